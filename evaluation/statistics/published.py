"""Published figures (data/reference/, facts with their sources): next to the measured ones, and as the paper's Table 1.

A published figure stands only next to what it was published of: the whole bench, the paper's limit, a method as its
configuration has it, Token Recycling with the tree 2.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from model.files import ROOT

from ..records.questions import FILE_ORDER, SUBTASKS
from ..records.runs import Run
from .columns import TABLE1
from .metrics import OVERALL
from .pools import Pool, paired, pools
from .tables import baseline, speedup, unavailable

REFERENCE = ROOT / "data/reference"
CODE = "code"  # MBPP's subtask
PAPER_SUBTASKS = {"mt": "mt_bench"} | {name: name for name in SUBTASKS if name not in ("mt_bench", CODE)}
PAPER_NAMES = {"hf": "ar"}  # what the paper calls a method of ours


def read_published(name: str) -> list[dict[str, Any]]:
    """Return the rows of one file of data/reference."""
    rows: list[dict[str, Any]] = pd.read_csv(REFERENCE / f"{name}.csv").to_dict("records")  # type: ignore[assignment]
    return rows


# File of data/reference, its rows' device, our name for a source; and what a method of ours is called in it.
SAM_NAMES = {"suffix": "sam", "suffix_recycling (hot)": "sam+recycling"}
SOURCES: tuple[tuple[str, str | None, str, dict[str, str]], ...] = (
    ("paper_table1", None, "paper, A100-80GB", PAPER_NAMES | {"recycling (hot)": "recycling"}),
    ("unofficial_a100_40gb", "A100-40GB", "smpanaro/token-recycling, A100-40GB", {}),
    ("specbench_leaderboard", "A100", "Spec-Bench leaderboard, A100", {}),
    ("sam_decoding_a6000", "A6000", "SAM-Decoding, A6000", SAM_NAMES),
)
WHOLE = {"spec_bench": 480, "mbpp": 399}  # questions of the benches that figures were published of
LIMIT = 1024  # new tokens a turn
TREES = {"recycling": "2.2.2", "suffix_recycling": "2.2.2"}
ANY = ("name", "drafter", "dtype")  # of a method's settings: what alters none of its figures
PAPER_COLUMNS = {subtask: column for column, subtask in PAPER_SUBTASKS.items()}


def with_published(table: pd.DataFrame, folder: Path = REFERENCE) -> pd.DataFrame:
    """Add `published_mat`, `published_speedup_hf` and `published_source` to the main table, where they were published.

    A row of a part of a bench, of another variant of a method, or of runs that are not done has none. The speedups are
    over transformers' own decoding on their device. A table of which nothing was published stays as it is.
    """
    sources = [(_by_method(folder / f"{name}.csv", device), words, names) for name, device, words, names in SOURCES]
    none = (None, None, None)
    figures = [_published(row, sources) if as_published(row) else none for row in table.to_dict("records")]
    if all(source is None for _, _, source in figures):
        return table
    mats, speedups, words = zip(*figures, strict=True)
    index = table.index
    return table.assign(
        published_mat=pd.Series(mats, index=index, dtype=float),
        published_speedup_hf=pd.Series(speedups, index=index, dtype=float),
        published_source=pd.Series(words, index=index, dtype=object),
    )


def _by_method(path: Path, device: str | None) -> dict[tuple[str, str], dict[Any, Any]]:
    """Return a file's rows by model and method, of one device if it has several; nothing if there is no file."""
    if not path.is_file():
        return {}
    rows = pd.read_csv(path).to_dict("records")
    return {(row["model"], row["method"]): row for row in rows if device in (None, row.get("device"))}


def as_published(row: dict[Any, Any]) -> bool:
    """Return whether a row of the main table measures what figures were published of."""
    method = str(row["method"]).partition(" (")[0]
    return (
        row.get("bench_questions") == WHOLE.get(row["bench"])
        and row.get("complete") is True
        and row.get("max_new_tokens") == LIMIT
        and _known(row, "order") in (None, FILE_ORDER)
        and _known(row, "tree") == TREES.get(method)
        and all(_known(row, key) == value for key, value in default_settings(method).items())
    )


def _known(row: dict[Any, Any], column: str) -> Any:
    """Return a cell; None where it is empty."""
    value = row.get(column)
    return None if value != value else value


@lru_cache(maxsize=64)
def default_settings(method: str) -> dict[str, Any]:
    """Return a method's settings in configs/method, but for the weights, which belong to a model; {} if unknown."""
    try:
        settings = yaml.safe_load((ROOT / f"configs/method/{method}.yaml").read_text(encoding="utf-8"))
    except OSError:
        return {}
    weights = [key for key, value in settings.items() if key.endswith("path") and value is not None]
    kept = {key: value for key, value in settings.items() if key not in (*ANY, *weights)}
    return {key: str(value) if isinstance(value, list | dict) else value for key, value in kept.items()}


def _published(row: dict[Any, Any], sources: list[Any]) -> tuple[float | None, float | None, str | None]:
    """Return the published (MAT, speedup, source) for a row of the main table."""
    bench, category = row["bench"], row["category"]
    whole = category == OVERALL or (bench, category) == ("mbpp", CODE)
    prefix = {"spec_bench": "specbench_", "mbpp": "mbpp_"}.get(bench)
    for rows, words, names in sources if prefix else ():
        figures = rows.get((row["model"], names.get(row["method"], row["method"])), {})
        if "mat" in figures:  # all but the paper's table are of Spec-Bench alone
            figures = figures | {"specbench_mat": figures["mat"], "specbench_speedup": figures["speedup"]}
        speedup = figures.get(f"{prefix}speedup" if whole else PAPER_COLUMNS.get(category, ""))
        if speedup is not None and speedup == speedup:
            return figures.get(f"{prefix}mat") if whole else None, speedup, words
    return None, None, None


# The paper's rows, in its order and by its names; what it calls AR is transformers' own generate.
PAPER_METHODS = {"ar": "AR", "lookahead": "Lookahead", "pld": "PLD", "rest": "REST", "medusa": "Medusa"}
PAPER_METHODS |= {"recycling": "Token Recycling"}
PUBLISHED, MEASURED = "published", "measured"
ABOUT = ("model", "other_bench", "method", "name", "source", "measured", "complete", "execution")
PARTS: dict[str, tuple[str, ...]] = {"specbench": tuple(PAPER_SUBTASKS.values()), "mbpp": (CODE,)}
ASKED = [f"{part}_questions" for part in PARTS]
PAPER_DTYPE = "float16"
APART = "not comparable with the published figures"


def table1(runs: Sequence[Run], left_out: Sequence[dict[str, str]] = ()) -> pd.DataFrame:
    """Build the paper's Table 1: published rows and measured rows of all models, in the paper's order.

    Speedups are over `hf` (the paper's AR) and empty where the folder has no such run. What was left out (by model and
    method, with `why`) has a row whose source says so. `measured` says of what a row was measured: benches, questions,
    and what is not as published. Rows of other benches than the paper's name theirs as `other_bench`, and stand behind
    all others: they are of other questions.
    """
    published = read_published("paper_table1")
    published = [row | {"name": PAPER_METHODS[row["method"]], "source": PUBLISHED} for row in published]
    rows = _measured(runs)
    measured = {(row["model"], row["method"]) for row in rows}
    on_paper_bench = {row["model"] for row in [*published, *rows] if "other_bench" not in row}
    for entry in {(e["model"], e["method"]): e for e in left_out}.values():
        model, method = entry["model"], PAPER_NAMES.get(entry["method"], entry["method"])
        if (model, method) not in measured:
            row = {"model": model, "method": method, "name": PAPER_METHODS.get(method, method)}
            row |= {} if entry["bench"] in WHOLE or model in on_paper_bench else {"other_bench": entry["bench"]}
            rows.append(row | {"source": unavailable(entry["why"])})
    rows += published
    models = list(dict.fromkeys(str(row["model"]) for row in rows))  # measured ones first
    order = list(PAPER_METHODS)

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        at = order.index(row["method"]) if row["method"] in order else len(order)
        model, bench = models.index(str(row["model"])), row.get("other_bench", "")
        return bench != "", model, bench, at, row["source"] != PUBLISHED

    rows.sort(key=place)
    blank = dict.fromkeys(("other_bench", "measured", "execution", "device"), "")
    frame = pd.DataFrame([blank | row for row in rows])
    return frame.reindex(columns=[*ABOUT, *(column.name for column in TABLE1), *ASKED, "device"]).astype(
        dict.fromkeys(ASKED, "Int64")
    )


def _measured(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Build one row a model, type, device, limit and method: of each part the run with most questions.

    What runs with fewer have measured stands in rows of their own, which say how many questions they are. Runs on
    another bench than the paper's are rows of that bench.
    """
    pooled = pools(runs)
    same: dict[tuple[str, ...], list[Pool]] = {}
    for pool in pooled:
        key = [str(pool.group[k]) for k in ("model", "dtype", "device", "max_new_tokens")]
        other = "" if pool.group["bench"] in WHOLE else str(pool.group["bench"])
        same.setdefault((*key, other, pool.first.execution, _name(pool)), []).append(pool)
    rows = []
    for (model, _, device, _, other, execution, name), group in same.items():
        method = PAPER_NAMES.get(group[0].method, group[0].method)
        about = {"model": model, "method": method, "name": name, "source": MEASURED, "device": device}
        about |= {"execution": execution} | ({"other_bench": other} if other else {})
        counts = {part: [len(pool.cells.of(*subtasks).questions) for pool in group] for part, subtasks in PARTS.items()}
        most = {part: count.index(max(count)) for part, count in counts.items()}  # of equals the first
        rows.append(about | _cells_of({part: group[i] for part, i in most.items()}, pooled))
        for i, pool in enumerate(group):
            rest = {part: pool for part in PARTS if most[part] != i and counts[part][i]}
            if rest:
                count = sum(counts[part][i] for part in rest)
                rows.append(about | {"name": f"{name}, {count} questions"} | _cells_of(rest, pooled))
    return rows


def _name(pool: Pool) -> str:
    """Name the method as the paper calls it, with its start where that is not the paper's, and its variant."""
    name = PAPER_METHODS.get(PAPER_NAMES.get(pool.method, pool.method), pool.method)
    if pool.first.settings["method"].get("start") not in (None, "hot"):
        name += pool.label.removeprefix(pool.method)
    return f"{name}, {pool.variant}" if pool.variant else name


def _cells_of(parts: dict[str, Pool], pooled: Sequence[Pool]) -> dict[str, Any]:
    """Return a row's figures, each part's from its own runs, and what they were measured on; NaN if there are none."""
    row: dict[str, Any] = dict.fromkeys((column.name for column in TABLE1), math.nan)
    first = next(iter(parts.values()))
    conditions: dict[str, None] = {}
    measured = []
    for part, pool in parts.items():
        base = baseline(pool, "hf", pooled)
        cells = pool.cells.of(*PARTS[part])
        row[f"{part}_questions"] = len(cells.questions)
        for column, value in zip(("mat", "tokens_per_second", "speedup"), _part(pool, base, PARTS[part]), strict=True):
            row[f"{part}_{column}"] = value
        if part == "specbench":
            row |= {column: _part(pool, base, (subtask,))[2] for column, subtask in PAPER_SUBTASKS.items()}
        if len(cells.questions):
            measured.append(pool)
            conditions[_conditions(pool)] = None
            common = len(cells.questions) if base is None else len(paired(cells, base.cells)[0].questions)
            if common < len(cells.questions):
                conditions[f"speedups over the {common} of them that AR has answered"] = None
    words = [*(conditions or [_conditions(first)]), *_departures(first)]
    return row | {"measured": "; ".join(words), "complete": all(pool.complete for pool in measured or [first])}


def _conditions(pool: Pool) -> str:
    """Say what it was measured on: the bench, how many of its questions, and whether all of them are answered."""
    bench, questions = str(pool.group["bench"]), pool.questions
    answered = min(len(rows) for rows in pool.answers.values())
    text = f"{bench}, {answered}{'' if answered == questions else f' of {questions}'} questions"
    if questions < WHOLE.get(bench, questions):
        text += f" of its {WHOLE[bench]}"
    return text if pool.complete else f"{text}, incomplete"


def _departures(pool: Pool) -> list[str]:
    """Say what is not as published: the limit and the type."""
    limit, dtype = pool.group["max_new_tokens"], pool.group["dtype"]
    return [f"max_new_tokens {limit}"] * (limit != LIMIT) + [str(dtype)] * (dtype != PAPER_DTYPE)


def _part(pool: Pool, base: Pool | None, subtasks: Sequence[str]) -> tuple[float, float, float]:
    """Return MAT, tokens/s and speedup over the baseline on these subtasks."""
    cells = pool.cells.of(*subtasks)
    if cells.questions.empty:
        return math.nan, math.nan, math.nan
    steps = np.nansum(cells.steps)
    mat = float(np.nansum(cells.tokens) / steps) if steps else math.nan
    speeds = cells.mean_speed()
    speed = float(np.nanmean(speeds)) if np.isfinite(speeds).any() else math.nan  # of runs that were not timed
    if base is None:
        return mat, speed, math.nan
    common = [both.mean_speed() for both in paired(cells, base.cells)]
    return mat, speed, speedup(*common)
