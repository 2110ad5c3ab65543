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

from model.engine.sampling import Sampling
from model.errors import UserError

from ..loading.bench import Bench
from ..records.identity import fingerprint
from ..records.provenance import describe_device
from ..records.rows import SCHEMA, difference, read_object
from ..records.runs import GENERATE
from .methods import Method


def run_settings(config: dict[str, Any], bench: Bench, method: Method) -> dict[str, Any]:
    """Return the fingerprint: everything that decides a run's answers and measurements."""
    loaded, target = method.loaded, method.loaded.target
    given = asdict(loaded.settings)
    del given["path"]  # its files' digests tell which it is, wherever it lies
    for key in ("chat_template_kwargs", "weights"):  # which earlier records have not
        if not given[key]:
            del given[key]
    attention = target.model.config.get_text_config()._attn_implementation
    model = given | {
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "template": loaded.template,
        "attention": "eager" if attention == "eager" else "sdpa",  # of draft nodes
        "context": target.context,
        "files": loaded.files,
    }
    ids = [q.question_id for q in bench.questions]
    asked = {"name": bench.name, "sha256": bench.sha256, "ids_sha256": _sha256(ids), "questions": len(ids)}
    sampling = changed_sampling(config)
    return {
        "model": model,
        "bench": asked | {"order": bench.order},
        "method": recorded_method(method.settings, sampling),
        "execution": method.execution,
        "schema": SCHEMA,
        "sampling": sampling,
        **{key: config[key] for key in ("max_new_tokens", "num_choices", "seed", "phases", "repeat", "timed")},
    }


def changed_sampling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling settings that differ from plain greedy decoding."""
    greedy, sampling = asdict(Sampling()), config["sampling"]
    idle = () if sampling.get("temperature") else ("top_k", "top_p", "min_p")  # they do not change the arg-max
    return {key: value for key, value in sampling.items() if value != greedy[key] and key not in idle}


def recorded_method(method: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Return a method's settings as records hold them: share_noise only if `changed_sampling` says tokens are drawn."""
    shares = method.get("share_noise") and sampling.get("temperature")
    return {key: value for key, value in method.items() if key != "share_noise" or shares}


def execution_used(method: Method) -> str:
    """Return the execution of a run's steps; `hf` uses transformers' own decoding."""
    return GENERATE if method.drafter is None else method.execution


def runs_folder(config: dict[str, Any]) -> Path:
    """Return the folder of an experiment's runs."""
    return Path(config["results_dir"]) / str(config["name"]) / "runs"


def default_folder(config: dict[str, Any], settings: dict[str, Any], method: Method) -> Path:
    """Return the folder of a configuration: readable words and a hash of the fingerprint."""
    words = [settings["model"]["name"], settings["bench"]["name"], method.label, method.settings.get("tree", "")]
    name = "-".join(re.sub(r"[^\w.]+", "_", str(word)).strip("_") for word in words if word)
    return runs_folder(config) / f"{name}-{_sha256(fingerprint(settings))[:8]}"


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


def saved_start(config: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return the state file for start=saved: of the hot run of the same configuration in this experiment's folder.

    Of several update rules it takes the run with update=all, which also makes the state for update=frozen. Of several
    repeats it takes the same one if it is there, so that the choice does not depend on which are finished.

    Args:
        settings: of that hot run, from `run_settings`.

    Raises UserError if there is no such run yet.
    """
    hot, found = settings["method"], []
    for path in runs_folder(config).glob("*/state.safetensors"):
        recorded = read_object(path.parent / "metadata.json").get("settings", {})
        there = recorded.get("method", {})
        if recorded.get("schema") == SCHEMA and all(there[key] == hot[key] for key in ("name", "start")):
            unlike = difference(_state_settings(recorded), _state_settings(settings) | {"update": "all"})
            repeat, *others = [recorded[key] != settings[key] for key in ("repeat", "execution", "timed")]
            found.append((unlike, repeat, recorded["repeat"], *others, str(path)))
    unlike, *_, state = min(found, default=("", ""))  # one that is unlike in nothing is the first
    if state and not unlike:
        return str(state)
    nearest = f" (of the one there, {unlike})" if unlike else ""
    wanted = f"{hot['name']} with start=hot on {settings['model']['name']}"
    how = "run it first (in a sweep: start=hot,saved), or name a file"
    raise UserError(
        f"start=saved: there is no finished run of {wanted} in {runs_folder(config).parent}{nearest}; {how}"
    )


def _state_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the state that a run leaves."""
    method = dict(fingerprint(settings)["method"])
    update = method.pop("update", "all")
    without = ("repeat", "execution", "timed", "phases")
    return {k: v for k, v in settings.items() if k not in without} | {"method": method, "update": update}


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
