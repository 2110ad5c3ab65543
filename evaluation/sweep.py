"""The harness as a function: what a sweep's command line does, and its table as a frame.

from evaluation.sweep import evaluate

frame = evaluate("smollm2-135m", "spec_bench", ["vanilla", "recycling"], start=["cold", "hot"], max_new_tokens=128)
frame[frame.category == "overall"][["method", "mat", "tokens_per_second", "speedup_vanilla"]]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from model.errors import UserError
from model.files import ROOT

from .configuration.config import checked_config
from .configuration.fingerprint import SAVED
from .configuration.jobs import expand
from .loading.locks import keep_devices
from .records.provenance import flat
from .records.runs import runs_at
from .run import config_error
from .running.scheduling import Job, run_jobs
from .statistics.tables import main_table

CONFIGS = ROOT / "configs"


def evaluate(
    model: str = "embedded",
    bench: str = "sample",
    method: str | Sequence[str] = "recycling",
    *,
    name: str = "evaluate",
    results_dir: str | Path = "results",
    **settings: Any,
) -> pd.DataFrame:
    """Measure methods on a bench, in turn, and return the rows of these runs as `tables/main.csv` has them.

    Runs are kept as a command's are: what was answered before is read and not run again, what was interrupted goes on.

    Args:
        model: a name of configs/model, or a folder or hub name.
        bench: a name of configs/bench, or a file of questions.
        method: names of configs/method, one or several.
        name: of the experiment; its results go to results_dir/name.
        settings: any of configs/config.yaml; those of a group with two underscores for the dot (method__k=4) or in a
            dictionary ({"method.k": 4}, by **; sampling={"temperature": 1.0}). A list is swept: every combination runs,
            without what a method has not; what is itself a list stands in one (bench__categories=[["qa", "rag"]]).
            An experiment's file, a tracker and run_dir are for the command line.

    Raises:
        UserError: whatever a user can mend; the runs before it are kept.
    """
    for key in ("experiment", "tracking", "run_dir"):
        if settings.get(key) is not None:
            raise UserError(f"{key}: is for the command line, bash eval.sh {key}=...; see what evaluate() takes")
    given: dict[str, Any] = {
        **_named("model", model, "path"),
        **_named("bench", bench, "file"),
        "method": method,
        "interleave": True,
        **{key.replace("__", "."): value for key, value in flat(settings)},
        "name": str(name),
        "results_dir": str(results_dir),
    }
    jobs = [Job(checked_config(_composed(job))) for job in _combinations(given)]
    with keep_devices():  # what starts from a saved state comes when the runs that save one are done
        for last in (False, True):
            run_jobs([job for job in jobs if (job.config["start"] == SAVED) == last])
    return main_table(runs_at({folder for job in jobs for folder in job.folders.values()}))


def _named(group: str, name: str, otherwise: str) -> dict[str, str]:
    """The overrides for a shipped config of this name, or for the one that takes a path."""
    if (CONFIGS / group / f"{name}.yaml").is_file() and name != otherwise:
        return {group: name}
    return {group: otherwise, f"{group}.path": name}


def _combinations(given: dict[str, Any]) -> list[list[str]]:
    """The overrides of each job: of every combination what its method and its tree have, no two jobs alike."""
    for key, value in given.items():
        if isinstance(value, list | tuple) and not value:
            raise UserError(f"{key}: an empty list; name at least one")
    lists = [
        [f"{key}={_text(one)}" for one in (value if isinstance(value, list | tuple) else [value])]
        for key, value in given.items()
    ]
    defaults = {"method": "recycling", "tree": "2.2.2"}
    jobs, used = expand(product(*lists), defaults, _find)
    for key in given:
        if "." in key and key not in used:
            raise UserError(f"{key}: none of the methods or trees has this setting")
    return jobs


@lru_cache(maxsize=64)
def _find(name: str) -> Any:
    path = CONFIGS / f"{name}.yaml"
    return OmegaConf.load(path) if path.is_file() else None


def _text(value: Any) -> str:
    """A value as a command line writes it. Text is always quoted: bare, 2024_06_01 is a number and null is none."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    plain = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))  # no interpolation: OmegaConf halves backslashes before one
    return str(QuotedString(plain, Quote.single).with_quotes())


def _composed(overrides: list[str]) -> Any:
    """Raises UserError for what Hydra does not find."""
    try:
        with initialize_config_dir(str(CONFIGS), version_base=None):
            cfg = compose("config", overrides)
        OmegaConf.resolve(cfg)
        return cfg
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(config_error(error)) from None
