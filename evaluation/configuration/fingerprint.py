"""A run's fingerprint, and the folder named by it.

The fingerprint holds the settings that decide a run's answers and measurements.
"""

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

from ..answerers import Answerer
from ..loading.bench import Bench
from ..records.provenance import describe_device
from ..records.rows import SCHEMA, read_object
from ..records.runs import without_paths

IDLE_IF_GREEDY = ("top_k", "top_p", "min_p")  # sampling settings that do not change the arg-max


def run_settings(config: dict[str, Any], bench: Bench, answerer: Answerer) -> dict[str, Any]:
    """Return the fingerprint: everything that decides a run's answers and measurements."""
    loaded = answerer.loaded
    target = loaded.target
    attention = target.model.config.get_text_config()._attn_implementation
    model = asdict(loaded.settings) | {
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "template": loaded.template,
        "attention": "eager" if attention == "eager" else "sdpa",  # of draft nodes
        "context": target.context,
        "files": loaded.files,
    }
    del model["path"]  # the files' digests identify the model, wherever it is stored

    for key in ("chat_template_kwargs", "weights"):  # earlier records lack these keys
        if not model[key]:
            del model[key]

    ids = [question.question_id for question in bench.questions]
    sampling = changed_sampling(config)
    as_asked = ("max_new_tokens", "num_choices", "seed", "phases", "repeat", "timed")
    return {
        "model": model,
        "bench": {
            "name": bench.name,
            "sha256": bench.sha256,
            "ids_sha256": _sha256(ids),
            "questions": len(ids),
            "order": bench.order,
        },
        "method": recorded_method(answerer.settings, sampling),
        "execution": answerer.execution,
        "schema": SCHEMA,
        "sampling": sampling,
        **{key: config[key] for key in as_asked},
        # earlier records lack this key
        **({"batch": config["batch"]} if config["batch"] > 1 else {}),
    }


def changed_sampling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling settings that differ from plain greedy decoding."""
    greedy = asdict(Sampling())
    asked = config["sampling"]
    idle = () if asked.get("temperature") else IDLE_IF_GREEDY
    return {key: asked[key] for key in asked if key not in idle and asked[key] != greedy[key]}


def runs_folder(config: dict[str, Any]) -> Path:
    """Return the folder of an experiment's runs."""
    return Path(config["results_dir"]) / str(config["name"]) / "runs"


def recorded_threads(config: dict[str, Any]) -> int | None:
    """Return the number of threads that an experiment's runs used on this processor.

    Unfinished runs come first.

    So all configurations use one number, and a run is resumed with its own, however busy the
    machine is then. None if no run has recorded it, or if OMP_NUM_THREADS is set.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return None

    found = []
    for folder in [Path(config["run_dir"])] if config["run_dir"] else runs_folder(config).glob("*"):
        recorded = read_object(folder / "metadata.json")
        threads = recorded.get("threads")
        if threads and recorded.get("device") == describe_device(torch.device("cpu"), threads):
            found.append(((folder / "summary.json").exists(), threads))

    return min(found)[1] if found else None


def default_folder(config: dict[str, Any], settings: dict[str, Any], answerer: Answerer) -> Path:
    """Return the folder of a configuration: readable words and a hash of the fingerprint."""
    words = [
        settings["model"]["name"],
        settings["bench"]["name"],
        answerer.label,
        answerer.settings.get("tree", ""),
    ]
    name = "-".join(re.sub(r"[^\w.]+", "_", str(word)).strip("_") for word in words if word)
    return runs_folder(config) / f"{name}-{_sha256(without_paths(settings))[:8]}"


def saved_start(config: dict[str, Any], settings: dict[str, Any], answerer: Answerer) -> str:
    """Return the state file for start=saved.

    It is from the hot run of the same configuration in this experiment's folder.

    The hot run of the same repeat is used, else that of the first repeat. Other update rules use
    the run of update=all.

    Args:
        settings, answerer: the hot run's; `settings` as `run_settings` returns them.

    Raises:
        UserError: there is no such run yet.
    """
    update = {"update": "all"} if "update" in settings["method"] else {}
    for repeat in (settings["repeat"], 0):
        hot = settings | {"method": settings["method"] | update, "repeat": repeat}
        state = default_folder(config, hot, answerer) / "state.safetensors"
        if state.exists():
            return str(state)

    raise UserError(
        f"start=saved: there is no finished run of {settings['method']['name']} with start=hot,"
        f" these settings and these files in {runs_folder(config)}; run it first (in a sweep:"
        " start=hot,saved), or name a file"
    )


def recorded_method(method: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Return a method's settings as records hold them.

    share_noise is there only if tokens are sampled, layers only if given, compiled only if true.

    Args:
        sampling: from `changed_sampling`.
    """
    needed = {
        "share_noise": method.get("share_noise") and sampling.get("temperature"),
        # earlier records lack these keys
        "layers": method.get("layers"),
        "compiled": method.get("compiled"),
    }
    return {key: value for key, value in method.items() if needed.get(key, True)}


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
