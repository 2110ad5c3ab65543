"""A run's fingerprint: the settings that decide its answers and measurements, and the folder named by them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from model.engine import Target
from model.engine.sampling import Sampling
from model.errors import UserError

from ..answerers import Answerer
from ..loading.bench import Bench
from ..records.identity import fingerprint
from ..records.provenance import describe_device
from ..records.rows import SCHEMA, difference, read_object


def run_settings(config: dict[str, Any], bench: Bench, answerer: Answerer) -> dict[str, Any]:
    """Return the fingerprint: everything that decides a run's answers and measurements."""
    loaded = answerer.loaded
    model = asdict(loaded.settings) | {
        "dtype": str(loaded.target.dtype).removeprefix("torch."),
        "device": loaded.target.device.type,
        "template": loaded.template,
        "attention": _attention(loaded.target),
        "context": loaded.target.context,
        "files": loaded.files,
    }
    del model["path"]  # its files' digests tell which it is, wherever it lies
    for key in ("chat_template_kwargs", "weights"):  # which earlier records have not
        if not model[key]:
            del model[key]
    ids = [q.question_id for q in bench.questions]
    return {
        "model": model,
        "bench": {"name": bench.name, "sha256": bench.sha256, "ids_sha256": _sha256(ids), "questions": len(ids)}
        | {"order": bench.order},
        "method": recorded_method(answerer.settings, changed_sampling(config)),
        "execution": answerer.execution,
        "max_new_tokens": config["max_new_tokens"],
        "num_choices": config["num_choices"],
        "schema": SCHEMA,
        "seed": config["seed"],
        "phases": config["phases"],
        "repeat": config["repeat"],
        "timed": config["timed"],
        "sampling": changed_sampling(config),
    }


def changed_sampling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling settings that differ from plain greedy decoding."""
    greedy, sampling = asdict(Sampling()), config["sampling"]
    idle = () if sampling.get("temperature") else ("top_k", "top_p", "min_p")  # they do not change the arg-max
    return {key: value for key, value in sampling.items() if value != greedy[key] and key not in idle}


def _attention(target: Target) -> str:
    """Return the attention of draft nodes: sdpa or eager."""
    implementation = target.model.config.get_text_config()._attn_implementation
    return "eager" if implementation == "eager" else "sdpa"


def runs_folder(config: dict[str, Any]) -> Path:
    """Return the folder of an experiment's runs."""
    return Path(config["results_dir"]) / str(config["name"]) / "runs"


def recorded_threads(config: dict[str, Any]) -> int | None:
    """Return the threads of an experiment's runs on this processor, those of unfinished ones first.

    So all configurations have one number, and a run is resumed with its own, whatever else is at work by then. None
    where there is none yet, or where OMP_NUM_THREADS says it.
    """
    folders = [Path(config["run_dir"])] if config["run_dir"] else runs_folder(config).glob("*")
    found = []
    for folder in folders if not os.environ.get("OMP_NUM_THREADS") else ():
        recorded = read_object(folder / "metadata.json")
        threads = recorded.get("threads")
        if threads and recorded.get("device") == describe_device(torch.device("cpu"), threads):
            found.append(((folder / "summary.json").exists(), threads))
    return min(found)[1] if found else None


def default_folder(config: dict[str, Any], settings: dict[str, Any], answerer: Answerer) -> Path:
    """Return the folder of a configuration: readable words and a hash of the fingerprint."""
    words = [settings["model"]["name"], settings["bench"]["name"], answerer.label, answerer.settings.get("tree", "")]
    name = "-".join(re.sub(r"[^\w.]+", "_", str(word)).strip("_") for word in words if word)
    return runs_folder(config) / f"{name}-{_sha256(fingerprint(settings))[:8]}"


def saved_start(config: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return the state file for start=saved: of the hot run of the same configuration in this experiment's folder.

    Of several update rules it takes the run with update=all, which also makes the state for update=frozen. Of several
    repeats it takes the same one if it is there, so that the choice does not depend on which are finished.

    Args:
        settings: of that hot run, from `run_settings`.

    Raises:
        UserError: there is no such run yet.
    """
    kind, states, nearest = [settings["method"][key] for key in ("name", "start")], [], ""
    for path in runs_folder(config).glob("*/state.safetensors"):
        recorded = read_object(path.parent / "metadata.json").get("settings", {})
        if recorded.get("schema") != SCHEMA or [recorded["method"][key] for key in ("name", "start")] != kind:
            continue
        unlike = difference(_deciding_state(recorded), _deciding_state(settings) | {"update": "all"})
        if unlike:
            nearest = f" (of the one there, {unlike})"
        else:
            others = [recorded[key] != settings[key] for key in ("repeat", "execution", "timed")]
            states.append((others[0], recorded["repeat"], *others[1:], str(path)))
    if states:
        return str(min(states)[-1])
    raise UserError(
        f"start=saved: there is no finished run of {kind[0]} with start=hot on {settings['model']['name']} in "
        f"{config['results_dir']}/{config['name']}{nearest}; "
        "run it first (in a sweep: start=hot,saved), or name a file"
    )


def _deciding_state(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the state that a run leaves."""
    without = ("repeat", "execution", "timed", "phases")
    kept = {key: value for key, value in fingerprint(settings).items() if key not in without}
    method = {key: value for key, value in kept["method"].items() if key != "update"}
    return kept | {"method": method, "update": settings["method"].get("update", "all")}


def recorded_method(method: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Return a method's settings as records hold them: share_noise only if tokens are drawn.

    Args:
        sampling: from `changed_sampling`.
    """
    shares = method.get("share_noise") and sampling.get("temperature")
    return {key: value for key, value in method.items() if key != "share_noise" or shares}


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
