"""A finished table's rows to an experiment tracker: a run a configuration, with its settings, MAT, speeds and subtasks.

Where it goes is said as the trackers themselves want it: WANDB_PROJECT, WANDB_MODE=offline, MLFLOW_TRACKING_URI, ...
The same command again brings the same runs up to date.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from model.errors import UserError

from .metrics import OVERALL
from .tables import GROUP

PROJECT = "token-recycling"
NAMES = ("model", "bench", "method", "variant")
MEASURED = ("questions", "new_tokens", "steps", "mat", "mat_low", "mat_high", "tokens_per_second", "state_bytes")
SPEEDUPS = tuple(f"speedup_{base}{end}" for base in ("hf", "vanilla") for end in ("", "_low", "_high"))


@dataclass(frozen=True)
class Tracked:
    """A configuration as trackers have it.

    Attributes:
        key: the same for the same configuration of the same experiment.
        metrics: overall by their names, by subtask as SUBTASK/mat.
    """

    key: str
    name: str
    settings: dict[str, Any]
    metrics: dict[str, float]


def track(table: pd.DataFrame, tracker: str, experiment: str) -> int:
    """Send a table; how many runs that were. Raises UserError for what the tracker refuses."""
    found = list(tracked(table, experiment))
    try:
        (_to_wandb if tracker == "wandb" else _to_mlflow)(found, experiment)
    except Exception as error:  # of a tracker's own kinds: no key, no network, a wrong address
        text = " ".join(str(error).split())[:300]
        raise UserError(f"tracking={tracker}: nothing more was sent ({type(error).__name__}: {text})") from None
    return len(found)


def tracked(table: pd.DataFrame, experiment: str) -> Iterator[Tracked]:
    """The configurations of a table, in its order."""
    by = [*NAMES, *(column for column in GROUP if column not in NAMES)]
    measured = [column for column in (*MEASURED, *SPEEDUPS) if column in table]
    ends = ("_std", "_low", "_high")
    others = [c for c in map(str, table.columns) if c not in (*by, *measured, "category") and not c.endswith(ends)]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_dict("records"):  # Python's own numbers
        own = {str(key): value for key, value in row.items()}
        rows.setdefault(json.dumps([experiment, *(str(own[column]) for column in by)]), []).append(own)
    for identity, own_rows in rows.items():
        metrics: dict[str, float] = {}
        for own in own_rows:
            of = "" if own["category"] == OVERALL else re.sub(r"[^\w. -]", "_", str(own["category"])) + "/"
            metrics |= {f"{of}{column}": float(own[column]) for column in measured if _is_number(own[column])}
        first = own_rows[0]
        settings = {column: _plain(first[column]) for column in (*by, *others) if not pd.isna(first[column])}
        name = " ".join(str(first[column]) for column in NAMES[2:] if first[column])
        yield Tracked(hashlib.sha256(identity.encode()).hexdigest()[:16], name, settings, metrics)


def _plain(value: Any) -> Any:
    """A whole number as such: in a column with gaps pandas has it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _to_wandb(found: list[Tracked], experiment: str) -> None:
    import wandb

    for one in found:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=experiment,
            id=one.key,
            name=one.name,
            config=one.settings,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        run.summary.update(one.metrics)
        run.finish()


def _to_mlflow(found: list[Tracked], experiment: str) -> None:
    import mlflow

    place = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", f"{PROJECT}/{experiment}"))
    for one in found:
        known = mlflow.search_runs(
            [place.experiment_id], filter_string=f"tags.configuration = '{one.key}'", output_format="list"
        )
        start = {"run_id": known[0].info.run_id} if known else {"run_name": one.name}
        with mlflow.start_run(**start):
            mlflow.set_tag("configuration", one.key)
            if not known:  # settings of a run cannot change, and are what its key is of
                mlflow.log_params(one.settings)
            mlflow.log_metrics(one.metrics)
