"""Finished tables for other programs: experiment trackers, and every turn as a row in Parquet.

A tracker has a run a configuration, with its settings, MAT, speeds and subtasks. Where it goes is said as the trackers
themselves want it: WANDB_PROJECT, WANDB_MODE=offline, MLFLOW_TRACKING_URI, ... The same command again brings the same
runs up to date.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from model.errors import UserError

from ..records.provenance import flat
from ..records.rows import Row
from ..records.runs import Run
from .metrics import OVERALL
from .pools import pools

PROJECT = "token-recycling"
TRACKED_COLUMNS = (
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
    """Send the table of these runs and return the number of configurations. Raises UserError if a tracker refuses."""
    configurations = list(tracked(runs, table, experiment))
    try:
        {"wandb": _to_wandb, "mlflow": _to_mlflow}[tracker](configurations, experiment)
    except Exception as error:  # of a tracker's own kinds: no key, no network, a wrong address
        text = " ".join(str(error).split())[:300]
        raise UserError(f"tracking={tracker}: nothing more was sent ({type(error).__name__}: {text})") from None
    return len(configurations)


def tracked(runs: Sequence[Run], table: pd.DataFrame, experiment: str) -> Iterator[Tracked]:
    """Yield the configurations, repeats and shards pooled, with their rows of the table."""
    rows = table.to_dict("records")
    for pool in pools(runs):
        metrics: dict[str, float] = {}
        identity = pool.group | {"method": pool.label, "variant": pool.variant}
        for row in rows:
            if all(row[key] == value for key, value in identity.items()):
                of = "" if row["category"] == OVERALL else re.sub(r"[^\w. -]", "_", str(row["category"])) + "/"
                metrics |= {f"{of}{name}": float(row[name]) for name in TRACKED_COLUMNS if _is_number(row.get(name))}
        settings = {key: v for key, v in flat(pool.first.settings) if key != "repeat" and v is not None and v != {}}
        settings |= {"label": pool.label, "device_name": pool.first.metadata["device"]}
        key = json.dumps([experiment, pool.first.configuration]).encode()
        yield Tracked(hashlib.sha256(key).hexdigest()[:16], pool.name, settings, metrics)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _to_wandb(configurations: list[Tracked], experiment: str) -> None:
    import wandb

    for one in configurations:
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


def _to_mlflow(configurations: list[Tracked], experiment: str) -> None:
    import mlflow

    place = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", f"{PROJECT}/{experiment}"))
    for one in configurations:
        known = mlflow.search_runs(
            [place.experiment_id], filter_string=f"tags.configuration = '{one.key}'", output_format="list"
        )
        start = {"run_id": known[0].info.run_id} if known else {"run_name": one.name}
        with mlflow.start_run(**start):
            mlflow.set_tag("configuration", one.key)
            if not known:  # settings of a run cannot change, and are what its key is of
                mlflow.log_params(one.settings)
            mlflow.log_metrics(one.metrics)


TURN_KEYS = (
    *("prompt_tokens", "new_tokens", "wall_time", "prefill_time", "decode_time", "setup_time"),
    *("forwards", "stop"),
)


def turns_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Build one row a turn: its run, what was measured (seconds), and `accept_lengths`, a list with a number a step."""
    return pd.DataFrame([row for pool in pools(runs) for run in pool.runs for row in _rows(run, pool.variant)])


def _rows(run: Run, variant: str) -> Iterator[dict[str, Any]]:
    settings = run.settings
    identity = {
        "model": settings["model"]["name"],
        "bench": settings["bench"]["name"],
        "method": run.label,
        "variant": variant,
        "repeat": run.repeat,
        "run": run.folder.name,
    }
    for answer in run.answers:
        question = {key: str(answer.get(key)) for key in ("question_id", "category")}  # ids may be numbers or texts
        for choice in answer["choices"]:
            for turn, measured in enumerate(_turns(choice)):
                yield identity | question | {"choice": choice["index"], "turn": turn} | measured


def _turns(choice: Row) -> Iterator[dict[str, Any]]:
    """Yield what was measured of each turn; the accepted lengths of all turns are in one list."""
    lengths, start = choice.get("accept_lengths"), 0
    for turn, steps in enumerate(choice["decoding_steps"]):
        measured = {key: choice[key][turn] if key in choice else None for key in TURN_KEYS}
        measured |= {"steps": steps, "accept_lengths": None if lengths is None else lengths[start : start + steps]}
        start += steps
        yield measured


def write_parquet(runs: Sequence[Run], table: pd.DataFrame, folder: Path) -> list[Path]:
    """Write main.parquet and turns.parquet and return their paths. Raises UserError without pyarrow."""
    try:
        import pyarrow  # noqa: F401 - pandas writes by it, and says less well that it is missing
    except ImportError:
        raise UserError("--parquet: needs pyarrow; pip install -r requirements-extras.txt") from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "main.parquet", folder / "turns.parquet"]
    for path, frame in zip(paths, (table, turns_table(runs)), strict=True):
        frame.to_parquet(path, index=False)
    return paths
