"""Published figures beside the measured ones: Table 1 of the paper, where data/reference/ holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from ..metrics import OVERALL
from ..published import MEASURED_AS, REFERENCE, SUBTASKS

TABLE = REFERENCE / "paper_table1.csv"
METHODS = MEASURED_AS | {"recycling (hot)": "recycling"}  # our labels; others are the paper's own
COLUMN = {subtask: column for column, subtask in SUBTASKS.items()}


def beside(table: pd.DataFrame, path: Path = TABLE) -> pd.DataFrame:
    """The table with `published_mat` and `published_speedup_hf`, where the paper has the model, bench and method.

    Its speedups are over transformers' own decoding on an A100-80GB; a table that has published columns stays as it is.
    """
    if not path.is_file() or any(str(c).startswith("published") for c in table.columns):
        return table
    paper = {(row["model"], row["method"]): row for row in pd.read_csv(path).to_dict("records")}
    found = [_published(row, paper) for row in table.to_dict("records")]
    if all(pair == (None, None) for pair in found):
        return table
    mats, speedups = zip(*found, strict=True)
    index = table.index
    return table.assign(
        published_mat=pd.Series(mats, index=index, dtype=float),
        published_speedup_hf=pd.Series(speedups, index=index, dtype=float),
    )


def _published(row: dict[Any, Any], paper: dict[Any, dict[Any, Any]]) -> tuple[float | None, float | None]:
    """(MAT, speedup) of the paper for a row of ours."""
    theirs = paper.get((row["model"], METHODS.get(row["method"], row["method"])))
    if theirs is None or row["bench"] not in ("spec_bench", "mbpp"):
        return None, None
    whole = row["category"] == OVERALL or (row["bench"], row["category"]) == ("mbpp", "code")
    prefix = "mbpp" if row["bench"] == "mbpp" else "specbench"
    mat = theirs[f"{prefix}_mat"] if whole else None
    column = f"{prefix}_speedup" if whole else COLUMN.get(row["category"], "")
    return mat, theirs.get(column)
