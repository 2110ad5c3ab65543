"""What tells runs apart: the settings that decide their answers and what is measured, and a folder named by them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from model.decoding import Target
from model.decoding.sampling import Sampling
from model.errors import UserError

from ..loading import processes
from ..loading.bench import Bench
from ..records.rows import SCHEMA
from ..records.runs import GENERATE
from .methods import HOT, Method

SAVED = "saved"  # start=saved: from what the hot run of the same configuration left
# Keys that leave a state as it is.
_NOT_THE_STATE = ("run_dir", "repeat", "repeats", "allow_mixed", "interleave", "timed", "tracking")


def run_settings(config: dict[str, Any], bench: Bench, method: Method) -> dict[str, Any]:
    """Everything that decides a run's answers and what it measures: its fingerprint."""
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
        "method": recorded(method.settings, sampled(config)),
        "execution": loaded.target.execution,
        "max_new_tokens": config["max_new_tokens"],
        "num_choices": config["num_choices"],
        "schema": SCHEMA,
        "seed": config["seed"],
        "phases": config["phases"],
        "repeat": config["repeat"],
        "timed": config["timed"],
        "sampling": sampled(config),
    }


def sampled(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of sampling that are not plain greedy decoding's."""
    plain, own = asdict(Sampling()), config["sampling"]
    idle = () if own.get("temperature") else ("top_k", "top_p", "min_p")  # what is left over makes no other arg-max
    return {key: value for key, value in own.items() if value != plain[key] and key not in idle}


def _attention(target: Target) -> str:
    """tree, sdpa or eager: what nodes attend by."""
    own = target.model.config.get_text_config()._attn_implementation
    return "tree" if target.switch is not None else "eager" if own == "eager" else "sdpa"


def execution_used(method: Method) -> str:
    """What a run's steps really are: transformers' own decoding has no steps of ours."""
    return GENERATE if method.drafter is None else method.loaded.target.execution


def default_folder(config: dict[str, Any], settings: dict[str, Any], method: Method) -> Path:
    """A directory of its own for each configuration: readable, and told apart by the fingerprint."""
    parts = [settings["model"]["name"], settings["bench"]["name"], method.label, method.settings.get("tree", "")]
    words = "-".join(re.sub(r"[^\w.]+", "_", str(part)).strip("_") for part in parts if part)
    return Path(config["results_dir"]) / str(config["name"]) / "runs" / f"{words}-{_sha256(settings)[:8]}"


def saved_start(config: dict[str, Any], settings: dict[str, Any]) -> str:
    """start=saved: the state that the hot run of the same configuration left in this experiment's folder.

    Of a method with several rules of update it is the one that writes everything, as a frozen state was made by it.

    Args:
        settings: of that hot run, as `run_settings` gives them; what its files are must be the same, too.

    Raises:
        UserError: there is none yet.
    """
    wanted = _source(config | {"start": HOT}, "all")
    found: dict[int, str] = {}  # by repeat; a timed run and an untimed one leave the same
    others = 0  # of the same configuration, with other files
    folder = Path(config["results_dir"]) / str(config["name"]) / "runs"
    for alike in (True, False):
        for path in sorted(folder.glob("*/state.safetensors")):
            metadata = json.loads((path.parent / "metadata.json").read_text(encoding="utf-8"))
            held = metadata["config"]
            if metadata["settings"].get("schema") != SCHEMA:
                continue
            same = _source(held, held["method"].get("update", "all")) == wanted
            if same and _contents(metadata["settings"]) != _contents(settings):
                others += 1
            elif same and (held["timed"] == config["timed"]) is alike:
                found.setdefault(int(held["repeat"] or 0), str(path))
    if found:  # the same repeat's, as another one may not be there yet, and then this run would not be the same again
        return found.get(int(config["repeat"] or 0), found[min(found)])
    raise UserError(
        f"start=saved: there is no finished run of {config['method']['name']} with start=hot on "
        f"{settings['model']['name']} in {config['results_dir']}/{config['name']}"
        f"{' (the one there is of other weights, tokenizer, questions or companions)' if others else ''}; run it first "
        "(in a sweep: start=hot,saved), or name a file"
    )


def _contents(settings: dict[str, Any]) -> dict[str, Any]:
    """Which files a run was made from."""
    companions = {k: v for k, v in settings["method"].items() if k.endswith("sha256") and k != "start_sha256"}
    return {"model": settings["model"]["files"], "bench": settings["bench"]["sha256"], **companions}


def _source(config: dict[str, Any], update: str) -> dict[str, Any]:
    """What decides the state that a run leaves."""
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_STATE}
    method = recorded(config["method"], sampled(config)) | {"update": update}
    return kept | {"sampling": sampled(config), "method": method}


def recorded(method: dict[str, Any], drawn: dict[str, Any]) -> dict[str, Any]:
    """A method's settings as records hold them: that noise is shared only where there is some.

    Args:
        drawn: the settings of sampling that are not plain greedy decoding's.
    """
    shares = method.get("share_noise") and drawn.get("temperature")
    return {key: value for key, value in method.items() if key != "share_noise" or shares}


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
