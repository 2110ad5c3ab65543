"""Rows of a table for what could not be measured: no companion for that model. They read `not available: why`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from ..records.sweeps import not_available
from .metrics import OVERALL
from .tables import GROUP

NOTE = "note"


def with_unavailable(table: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """The main table with a row for each method that a sweep into this experiment's folder left out.

    It stands in the block of its model and bench; where they have several (another type or device), in each; where they
    have none, in one of its own. Counts are 0, measures empty, the column `note` says why. A method that was measured
    since has no such row. Without any the table stays as it is.
    """
    rows: list[dict[Any, Any]] = []
    nothing = {name: _nothing(table[name]) for name in table.columns}
    empty: dict[Any, Any] = {key: "" if nothing[key] is None else nothing[key] for key in GROUP}
    for left_out in not_available(folder):
        about = {key: left_out[key] for key in ("model", "bench", "method")}
        same = table[(table["model"] == about["model"]) & (table["bench"] == about["bench"])]
        if _measured(same, about["method"]):
            continue
        about |= {"category": OVERALL, NOTE: f"not available: {left_out['why']}"}
        blocks = same[GROUP].drop_duplicates().to_dict("records")
        rows += [nothing | block | about for block in blocks or [empty]]
    if not rows:
        return table
    below = pd.DataFrame(rows).astype({name: table[name].dtype for name in table.columns})
    return pd.concat([table.assign(**{NOTE: None}), below], ignore_index=True)


def _measured(table: pd.DataFrame, method: str) -> bool:
    """Whether a method, of whatever start, has rows."""
    return bool((table["method"].astype(str).str.split(" (", regex=False).str[0] == method).any())


def _nothing(values: pd.Series[Any]) -> Any:
    if pd.api.types.is_bool_dtype(values):
        return False
    if pd.api.types.is_integer_dtype(values):
        return 0
    return math.nan if pd.api.types.is_float_dtype(values) else None
