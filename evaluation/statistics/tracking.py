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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from model.errors import UserError

from ..records.provenance import flat
from ..records.runs import Run
from .metrics import OVERALL
from .pools import pools

PROJECT = "token-recycling"
MEASURED = (
    *("questions", "new_tokens", "steps", "mat", "mat_low", "mat_high", "mat_macro"),
    *("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high", "state_bytes", "peak_memory_mib"),
    *(f"speedup_{base}{end}" for base in ("hf", "vanilla") for end in ("", "_low", "_high")),
)


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


def track(runs: Sequence[Run], table: pd.DataFrame, tracker: str, experiment: str) -> int:
    """Send the table of these runs; how many configurations that were. Raises UserError for what a tracker refuses."""
    found = list(tracked(runs, table, experiment))
    try:
        {"wandb": _to_wandb, "mlflow": _to_mlflow}[tracker](found, experiment)
    except Exception as error:  # of a tracker's own kinds: no key, no network, a wrong address
        text = " ".join(str(error).split())[:300]
        raise UserError(f"tracking={tracker}: nothing more was sent ({type(error).__name__}: {text})") from None
    return len(found)


def tracked(runs: Sequence[Run], table: pd.DataFrame, experiment: str) -> Iterator[Tracked]:
    """The configurations, repeats and shards pooled, with their rows of the table."""
    rows = table.to_dict("records")
    for pool in pools(runs):
        metrics: dict[str, float] = {}
        whose = pool.group | {"method": pool.label, "variant": pool.variant}
        for row in rows:
            if all(row[key] == value for key, value in whose.items()):
                of = "" if row["category"] == OVERALL else re.sub(r"[^\w. -]", "_", str(row["category"])) + "/"
                metrics |= {f"{of}{name}": float(row[name]) for name in MEASURED if _is_number(row.get(name))}
        settings = {key: v for key, v in flat(pool.first.settings) if key != "repeat" and v is not None and v != {}}
        settings |= {"label": pool.label, "device_name": pool.first.metadata["device"]}
        identity = json.dumps([experiment, pool.first.configuration]).encode()
        yield Tracked(hashlib.sha256(identity).hexdigest()[:16], pool.name, settings, metrics)


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
