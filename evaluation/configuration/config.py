"""What a configuration may hold: a setting that nobody takes, or not so, is told in one line with its place.

Which settings there are, of which types, and which may be left out: the signatures say it of those who take them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf

from model.decoding.sampling import Sampling
from model.errors import UserError
from model.recycling import build_template

from ..loading.bench import load_bench
from ..loading.processes import world_size
from ..loading.settings import ModelSettings, check
from .companions import make_ready

GROUPS: dict[str, Callable[..., Any]] = {"model": ModelSettings, "bench": load_bench, "tree": build_template}
GROUPS["sampling"] = Sampling
Tracker = Literal["wandb", "mlflow"]
TRACKERS = get_args(Tracker)
NOT_HERE = ("k", "seed", "processors")  # the method's, where a tree takes it; the run's; and what is code
LEAST = {"max_new_tokens": 1, "num_choices": 1, "repeats": 1, "repeat": 0}


def register_names() -> None:
    """Teach OmegaConf ${plain:NAME} of configs/: a name as part of a folder's name, without a path's slashes."""
    OmegaConf.register_new_resolver("plain", lambda name: re.sub(r"[^\w.-]+", "_", str(name)).strip("_."), replace=True)


register_names()  # in every process that a launcher starts, too: it imports the run's module, and that this one


@dataclass
class Settings:
    """A run's configuration; configs/config.yaml explains it."""

    model: dict[str, Any]
    bench: dict[str, Any]
    method: dict[str, Any]
    tree: dict[str, Any]
    sampling: dict[str, Any]
    name: str
    start: str
    max_new_tokens: int
    execution: str
    num_choices: int
    repeats: int
    repeat: int | None
    interleave: bool
    allow_mixed: bool
    timed: bool
    phases: bool
    seed: int
    results_dir: str
    run_dir: str | None
    tracking: Tracker | None


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The configuration of a run, resolved, as its records hold it; what its method needs is there then.

    Raises:
        UserError: what is wrong with it; nothing is loaded yet, and no device waited for.
    """
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    check(config, Settings, own=True)
    check_groups(config)
    for key in sorted({"name", "drafter"} - config["method"].keys()):
        raise UserError(f"method.{key}: a method needs this setting")
    for key, least in LEAST.items():
        if config[key] is not None and config[key] < least:
            raise UserError(f"{key}={config[key]}: must be a whole number, at least {least}")
    repeats, folder = config["repeats"], config["run_dir"]
    if folder is not None and repeats > 1 and config["repeat"] is None:
        raise UserError(f"run_dir={folder}: holds one run, but repeats={repeats}; leave out one of the two")
    if config["phases"] and not config["timed"]:
        raise UserError(
            "phases=true: times the parts of a step, and timed=false takes no times; leave out one of the two"
        )
    if config["tree"]["name"] == "online" and not config["timed"]:
        raise UserError("tree=online: sizes follow the times of steps, and timed=false takes none; use tree=auto")
    Sampling(**config["sampling"])
    if config["tree"]["name"] == "online" and world_size() > 1:
        raise UserError("tree=online: follows the clock, and ranks must draft alike; use tree=auto, or a fixed tree")
    check_tracking(config["tracking"], config["run_dir"])
    make_ready(config["method"], config["model"]["name"])
    return config


def check_tracking(name: str | None, run_dir: str | None) -> None:
    """Raises UserError for a tracker that is not there, or that has no place to put anything."""
    if name is None:
        return
    found = find_spec(name)
    if found is None or found.origin is None:  # a folder of that name, as wandb itself makes, is no package
        raise UserError(f"tracking={name}: is not installed; pip install -r requirements-extras.txt")
    if run_dir is not None:
        raise UserError(f"tracking={name}: sends an experiment's table, and with run_dir there is none; leave out one")
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI") and find_spec("sqlalchemy") is None:
        raise UserError(
            "tracking=mlflow: say where in MLFLOW_TRACKING_URI, as http://HOST:PORT (or pip install mlflow: the small "
            "mlflow-skinny has no database of its own)"
        )


def check_groups(config: dict[str, Any]) -> None:
    """`check` of those groups that are given, but of a method's settings, which are its drafter's."""
    for group in sorted(GROUPS.keys() & config.keys()):
        check(config[group], GROUPS[group], f"{group}.", without=NOT_HERE)
