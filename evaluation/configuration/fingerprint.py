"""A run's fingerprint: the settings that decide its answers and measurements, and the folder named by them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from model.engine import Target
from model.engine.sampling import Sampling
from model.errors import UserError

from ..loading import processes
from ..loading.bench import Bench
from ..records.rows import SCHEMA
from ..records.runs import GENERATE
from .methods import HOT, Method

SAVED = "saved"  # start=saved: start from the state that the hot run of the same configuration saved
_WITHOUT_EFFECT_ON_STATE = ("run_dir", "repeat", "repeats", "allow_mixed", "interleave", "timed")


def run_settings(config: dict[str, Any], bench: Bench, method: Method) -> dict[str, Any]:
    """Return the fingerprint: everything that decides a run's answers and measurements."""
    loaded = method.loaded
    model = asdict(loaded.settings) | {
        "dtype": str(loaded.target.dtype).removeprefix("torch."),
        "device": loaded.target.device.type,
        "template": loaded.template,
        "attention": _attention(loaded.target),
        "context": loaded.target.context,
        "processes": processes.world_size(),
        "files": loaded.files,
    }
    ids = [q.question_id for q in bench.questions]
    return {
        "model": model,
        "bench": {"name": bench.name, "sha256": bench.sha256, "ids_sha256": _sha256(ids), "questions": len(ids)}
        | {"order": bench.order},
        "method": recorded_method(method.settings, changed_sampling(config)),
        "execution": method.execution,
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


def execution_used(method: Method) -> str:
    """Return the execution of a run's steps; `hf` uses transformers' own decoding."""
    return GENERATE if method.drafter is None else method.execution


def default_folder(config: dict[str, Any], settings: dict[str, Any], method: Method) -> Path:
    """Return the folder of a configuration: readable words and a hash of the fingerprint."""
    parts = [settings["model"]["name"], settings["bench"]["name"], method.label, method.settings.get("tree", "")]
    words = "-".join(re.sub(r"[^\w.]+", "_", str(part)).strip("_") for part in parts if part)
    return Path(config["results_dir"]) / str(config["name"]) / "runs" / f"{words}-{_sha256(settings)[:8]}"


def saved_start(config: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return the state file for start=saved: of the hot run of the same configuration in this experiment's folder.

    Of several update rules it takes the run with update=all, which also makes the state for update=frozen.

    Args:
        settings: of that hot run, from `run_settings`; the digests of its files must match, too.

    Raises:
        UserError: there is no such run yet.
    """
    wanted = _state_settings(config | {"start": HOT}, "all")
    states: dict[int, str] = {}  # by repeat; a timed and an untimed run leave the same state
    other_files = 0  # runs of the same configuration from other files
    folder = Path(config["results_dir"]) / str(config["name"]) / "runs"
    for same_timing in (True, False):
        for path in sorted(folder.glob("*/state.safetensors")):
            metadata = json.loads((path.parent / "metadata.json").read_text(encoding="utf-8"))
            saved = metadata["config"]
            if metadata["settings"].get("schema") != SCHEMA:
                continue
            same = _state_settings(saved, saved["method"].get("update", "all")) == wanted
            if same and _file_digests(metadata["settings"]) != _file_digests(settings):
                other_files += 1
            elif same and (saved["timed"] == config["timed"]) is same_timing:
                states.setdefault(int(saved["repeat"] or 0), str(path))
    if states:  # of the same repeat if there is one, so that the choice does not depend on which repeats are finished
        return states.get(int(config["repeat"] or 0), states[min(states)])
    raise UserError(
        f"start=saved: there is no finished run of {config['method']['name']} with start=hot on "
        f"{settings['model']['name']} in {config['results_dir']}/{config['name']}"
        f"{' (the one there is of other weights, tokenizer, questions or companions)' if other_files else ''}; "
        "run it first (in a sweep: start=hot,saved), or name a file"
    )


def _file_digests(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of the files that a run read."""
    companions = {k: v for k, v in settings["method"].items() if k.endswith("sha256") and k != "start_sha256"}
    return {"model": settings["model"]["files"], "bench": settings["bench"]["sha256"], **companions}


def _state_settings(config: dict[str, Any], update: str) -> dict[str, Any]:
    """Return the settings that decide the state that a run leaves."""
    kept = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT_ON_STATE}
    method = recorded_method(config["method"], changed_sampling(config)) | {"update": update}
    return kept | {"sampling": changed_sampling(config), "method": method}


def recorded_method(method: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Return a method's settings as records hold them: share_noise only if tokens are drawn.

    Args:
        sampling: from `changed_sampling`.
    """
    shares = method.get("share_noise") and sampling.get("temperature")
    return {key: value for key, value in method.items() if key != "share_noise" or shares}


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
