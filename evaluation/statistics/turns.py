"""Every turn of every run as a row: for whoever would rather have a frame than a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from model.errors import UserError

from ..records.rows import Row
from ..records.runs import Run
from .pools import pools

MEASURED = ("prompt_tokens", "new_tokens", "wall_time", "prefill_time", "decode_time", "setup_time", "forwards", "stop")


def turns_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a turn: whose it is, what was measured (seconds), and `accept_lengths`, a list with a number a step."""
    return pd.DataFrame([row for pool in pools(runs) for run in pool.runs for row in _rows(run, pool.variant)])


def _rows(run: Run, variant: str) -> Iterator[dict[str, Any]]:
    settings = run.settings
    whose = {
        "model": settings["model"]["name"],
        "bench": settings["bench"]["name"],
        "method": run.label,
        "variant": variant,
        "repeat": run.repeat,
        "run": run.folder.name,
    }
    for answer in run.answers:
        asked = {key: str(answer.get(key)) for key in ("question_id", "category")}  # ids may be numbers or texts
        for choice in answer["choices"]:
            for turn, measured in enumerate(_turns(choice)):
                yield whose | asked | {"choice": choice["index"], "turn": turn} | measured


def _turns(choice: Row) -> Iterator[dict[str, Any]]:
    """What was measured of each turn; the accepted lengths of all turns stand in one list."""
    lengths, start = choice.get("accept_lengths"), 0
    for turn, steps in enumerate(choice["decoding_steps"]):
        found = {key: choice[key][turn] if key in choice else None for key in MEASURED}
        own = None if lengths is None else lengths[start : start + steps]
        start += steps
        yield found | {"steps": steps, "accept_lengths": own}


def write_parquet(runs: Sequence[Run], table: pd.DataFrame, folder: Path) -> list[Path]:
    """Write main.parquet and turns.parquet; their paths. Raises UserError without pyarrow."""
    try:
        import pyarrow  # noqa: F401 - pandas writes by it, and says less well that it is missing
    except ImportError:
        raise UserError("--parquet: needs pyarrow; pip install -r requirements-extras.txt") from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "main.parquet", folder / "turns.parquet"]
    for path, frame in zip(paths, (table, turns_table(runs)), strict=True):
        frame.to_parquet(path, index=False)
    return paths
