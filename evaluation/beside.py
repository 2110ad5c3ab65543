"""Published figures beside the measured ones: for each model, method and subtask the first source that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from .metrics import OVERALL
from .published import CODE, MEASURED_AS, REFERENCE, SUBTASKS

# File of data/reference, its rows' device, our name for a source; and what a method of ours is called in it.
SOURCES: tuple[tuple[str, str | None, str, dict[str, str]], ...] = (
    ("paper_table1", None, "paper, A100-80GB", MEASURED_AS | {"recycling (hot)": "recycling"}),
    ("unofficial_a100_40gb", "A100-40GB", "smpanaro/token-recycling, A100-40GB", {}),
    ("specbench_leaderboard", "A100", "Spec-Bench leaderboard, A100", {}),
    (
        "sam_decoding_a6000",
        "A6000",
        "SAM-Decoding, A6000",
        {"suffix": "sam", "suffix_recycling (hot)": "sam+recycling"},
    ),
)
COLUMN = {subtask: column for column, subtask in SUBTASKS.items()}


def beside(table: pd.DataFrame, folder: Path = REFERENCE) -> pd.DataFrame:
    """The main table with `published_mat`, `published_speedup_hf`, `published_source` where somebody published them.

    Their speedups are over transformers' own decoding on their device. A table of which nothing was published stays
    as it is.
    """
    sources = [(read(folder / f"{name}.csv", device), words, names) for name, device, words, names in SOURCES]
    found = [_published(row, sources) for row in table.to_dict("records")]
    if all(entry[2] is None for entry in found):
        return table
    mats, speedups, words = zip(*found, strict=True)
    index = table.index
    return table.assign(
        published_mat=pd.Series(mats, index=index, dtype=float),
        published_speedup_hf=pd.Series(speedups, index=index, dtype=float),
        published_source=pd.Series(words, index=index, dtype=object),
    )


def read(path: Path, device: str | None) -> dict[tuple[str, str], dict[Any, Any]]:
    """A file's rows by model and method, of one device if it has several; nothing if it is not there."""
    if not path.is_file():
        return {}
    rows = pd.read_csv(path).to_dict("records")
    return {(row["model"], row["method"]): row for row in rows if device in (None, row.get("device"))}


def _published(row: dict[Any, Any], sources: list[Any]) -> tuple[float | None, float | None, str | None]:
    """(MAT, speedup, source) for a row of ours."""
    bench, category = row["bench"], row["category"]
    whole = category == OVERALL or (bench, category) == ("mbpp", CODE)
    prefix = {"spec_bench": "specbench_", "mbpp": "mbpp_"}.get(bench)
    for rows, words, names in sources if prefix else ():
        theirs = rows.get((row["model"], names.get(row["method"], row["method"])), {})
        if "mat" in theirs:  # all but the paper's table are of Spec-Bench alone
            theirs = theirs | {"specbench_mat": theirs["mat"], "specbench_speedup": theirs["speedup"]}
        speedup = theirs.get(f"{prefix}speedup" if whole else COLUMN.get(category, ""))
        if speedup is not None and speedup == speedup:
            return theirs.get(f"{prefix}mat") if whole else None, speedup, words
    return None, None, None
