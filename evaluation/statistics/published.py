"""Published figures (data/reference/, facts with their sources), and which of the measured ones they stand beside.

They stand beside what they were published of and nothing else: the whole bench, the paper's limit, a method as its
configuration has it, Token Recycling with the tree 2.2.2.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from model.files import ROOT

from ..records.questions import FILE_ORDER, SUBTASKS
from .metrics import OVERALL

REFERENCE = ROOT / "data/reference"
CODE = "code"  # MBPP's subtask
PAPER_SUBTASKS = {"mt": "mt_bench"} | {name: name for name in SUBTASKS if name not in ("mt_bench", CODE)}
PAPER_NAMES = {"hf": "ar"}  # what the paper calls a method of ours


def read_published(name: str) -> list[dict[str, Any]]:
    """The rows of one file of data/reference."""
    rows: list[dict[str, Any]] = pd.read_csv(REFERENCE / f"{name}.csv").to_dict("records")  # type: ignore[assignment]
    return rows


# File of data/reference, its rows' device, our name for a source; and what a method of ours is called in it.
SOURCES: tuple[tuple[str, str | None, str, dict[str, str]], ...] = (
    ("paper_table1", None, "paper, A100-80GB", PAPER_NAMES | {"recycling (hot)": "recycling"}),
    ("unofficial_a100_40gb", "A100-40GB", "smpanaro/token-recycling, A100-40GB", {}),
    ("specbench_leaderboard", "A100", "Spec-Bench leaderboard, A100", {}),
    (
        "sam_decoding_a6000",
        "A6000",
        "SAM-Decoding, A6000",
        {"suffix": "sam", "suffix_recycling (hot)": "sam+recycling"},
    ),
)


WHOLE = {"spec_bench": 480, "mbpp": 399}  # questions of the benches that figures were published of
LIMIT = 1024  # new tokens a turn
TREES = {"recycling": "2.2.2", "suffix_recycling": "2.2.2"}
ANY = ("name", "drafter", "dtype")  # of a method's settings: what alters none of its figures
PAPER_COLUMNS = {subtask: column for column, subtask in PAPER_SUBTASKS.items()}


def beside(table: pd.DataFrame, folder: Path = REFERENCE) -> pd.DataFrame:
    """The main table with `published_mat`, `published_speedup_hf`, `published_source` where somebody published them.

    A row of a part of a bench, of another variant of a method, or of runs that are not done has none. The speedups are
    over transformers' own decoding on their device. A table of which nothing was published stays as it is.
    """
    sources = [(read(folder / f"{name}.csv", device), words, names) for name, device, words, names in SOURCES]
    none = (None, None, None)
    found = [_published(row, sources) if as_published(row) else none for row in table.to_dict("records")]
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


def as_published(row: dict[Any, Any]) -> bool:
    """Whether a row of the main table measures what figures were published of."""
    method = str(row["method"]).partition(" (")[0]
    return (
        row.get("bench_questions") == WHOLE.get(row["bench"])
        and row.get("complete") is True
        and row.get("max_new_tokens") == LIMIT
        and _held(row, "order") in (None, FILE_ORDER)
        and _held(row, "tree") == TREES.get(method)
        and all(_held(row, key) == value for key, value in default_settings(method).items())
    )


def _held(row: dict[Any, Any], column: str) -> Any:
    """A cell; None where it is empty."""
    value = row.get(column)
    return None if value != value else value


@lru_cache(maxsize=64)
def default_settings(method: str) -> dict[str, Any]:
    """What configs/method says of it, but for the weights, which belong to a model; nothing of an unknown method."""
    try:
        told = yaml.safe_load((ROOT / f"configs/method/{method}.yaml").read_text(encoding="utf-8"))
    except OSError:
        return {}
    weights = [key for key, value in told.items() if key.endswith("path") and value is not None]
    kept = {key: value for key, value in told.items() if key not in (*ANY, *weights)}
    return {key: str(value) if isinstance(value, list | dict) else value for key, value in kept.items()}


def _published(row: dict[Any, Any], sources: list[Any]) -> tuple[float | None, float | None, str | None]:
    """(MAT, speedup, source) for a row of ours."""
    bench, category = row["bench"], row["category"]
    whole = category == OVERALL or (bench, category) == ("mbpp", CODE)
    prefix = {"spec_bench": "specbench_", "mbpp": "mbpp_"}.get(bench)
    for rows, words, names in sources if prefix else ():
        theirs = rows.get((row["model"], names.get(row["method"], row["method"])), {})
        if "mat" in theirs:  # all but the paper's table are of Spec-Bench alone
            theirs = theirs | {"specbench_mat": theirs["mat"], "specbench_speedup": theirs["speedup"]}
        speedup = theirs.get(f"{prefix}speedup" if whole else PAPER_COLUMNS.get(category, ""))
        if speedup is not None and speedup == speedup:
            return theirs.get(f"{prefix}mat") if whole else None, speedup, words
    return None, None, None
