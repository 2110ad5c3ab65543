"""The main table as the page shows it: every number, formatted, with the raw value to sort by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pandas as pd

from model.files import ROOT

from ..statistics import executions
from ..statistics.intervals import spans_one
from ..statistics.metrics import OVERALL
from ..statistics.printing import QUESTIONS_ONLY
from ..statistics.tables import BASELINES, SHOWN, drift_unknown
from ..statistics.unavailable import NOTE

# Numbers that are settings and no measures.
SETTINGS = ("tree_nodes", "tree_depth", "tree_breadth", "k", "seed", "bench_questions", "max_new_tokens")
# Settings that the page says elsewhere.
SAID = (
    *("model", "bench", "dtype", "device", "complete", "execution", "seed", "max_new_tokens"),
    *("bench_questions", "questions_sha256", "temperature", "execution_hf", "execution_vanilla"),
)
OPEN = "~ "  # before the interval of a speedup that spans 1
TITLES = {
    "mat": "MAT",
    "mat_macro": "MAT macro",
    "tokens_per_second": "tokens/s",
    "tokens_per_second_total": "tokens/s, total",
    "tokens_per_second_decode": "tokens/s, decode",
    "new_tokens": "new tokens",
}


@dataclass(frozen=True)
class Column:
    """A column: `extra` ones are hidden until asked for; `meaning` is its written definition, if it has one."""

    name: str
    title: str
    number: bool
    extra: bool
    meaning: str


@dataclass(frozen=True)
class Cell:
    """`text` as printed; `value` what to sort by, empty where there is none; `interval` of the value, where known."""

    text: str
    value: str
    interval: str


@dataclass(frozen=True)
class Line:
    """A row: its cells in the order of the columns, and what it is filtered by."""

    method: str
    category: str
    baseline: bool
    overall: bool
    cells: list[Cell]


@dataclass(frozen=True)
class View:
    """The table: `same` are the settings that all rows share, said once above it; `marks` what the small print is."""

    columns: list[Column]
    lines: list[Line]
    same: list[tuple[str, str]]
    methods: list[str]
    categories: list[str]
    baselines: list[str]
    marks: list[str]


def view(table: pd.DataFrame) -> View:
    """The main table for the page, whatever columns it has: constant settings above it, empty measures left out."""
    columns, same = [], []
    by_method = table.groupby("method", sort=False)
    held = set(map(str, table.columns))
    told = "variant" in held and bool((table["variant"] != "").any())  # in which settings methods of one name differ
    for name in map(str, table.columns):
        if name.removesuffix("_low").removesuffix("_high") in held - {name}:
            continue  # an end of an interval: printed with its value
        values = table[name]
        number = _is_measure(name, values)
        if name in ("method", "category") or (number and values.notna().any()):
            columns.append(_column(name, number, extra=number and not _is_main(name)))
        elif not number and values.map(_text).nunique() == 1:
            same.append((name, name.replace("_", " "), _text(values.iloc[0])))
        elif not number and values.notna().any():
            among = table.groupby(["method", "bench", "bench_questions"]) if name == "questions_sha256" else by_method
            tells_apart = not told and bool((among[name].nunique(dropna=False) > 1).any())
            main = tells_apart or name in ("model", "bench", "variant", NOTE)
            if name.startswith("execution"):  # one for all is said above the table
                main = name == "execution" and len(executions.executions(table)) > 1
            columns.append(_column(name, name in SETTINGS, extra=not main))
    columns.sort(key=lambda c: (c.extra, c.name != "method", c.number))  # stable: names, then numbers, then extras
    lines = [_line(row, columns) for row in table.to_dict("records")]
    return View(
        columns,
        lines,
        [(term, value) for name, term, value in same if name not in SAID and value not in ("–", "False")],
        list(dict.fromkeys(line.method for line in lines)),
        list(dict.fromkeys(line.category for line in lines)),
        [name for name in BASELINES if f"speedup_{name}" in table and table[f"speedup_{name}"].notna().any()],
        _marks([cell.interval for line in lines for cell in line.cells], once=drift_unknown(table)),
    )


def _marks(intervals: list[str], *, once: bool) -> list[str]:
    found = []
    if any(intervals):
        found.append("The small print is the 95 % interval: of MAT over questions, of speeds over repeats, too.")
    if any(intervals) and once:
        found.append(QUESTIONS_ONLY[0].upper() + QUESTIONS_ONLY[1:] + ".")
    if any(interval.startswith(OPEN) for interval in intervals):
        found.append("~: the interval of this speedup spans 1, so it does not say which of the two is faster.")
    return found


def _is_measure(name: str, values: Any) -> bool:
    return name not in SETTINGS and pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def _is_main(name: str) -> bool:
    return name in SHOWN or (name.startswith(("speedup_", "published")) and not name.endswith("_std"))


def _column(name: str, number: bool, *, extra: bool) -> Column:
    title = TITLES.get(name, name.replace("_", " "))
    if name.startswith("speedup_"):
        title = "speedup over " + name.removeprefix("speedup_").replace("_", " ")
    return Column(name, title, number, extra, definitions().get(name, ""))


def _line(row: dict[Any, Any], columns: list[Column]) -> Line:
    method, category = str(row["method"]), str(row["category"])
    cells = [Cell(_text(row[c.name], c.name), _value(row[c.name]), _interval(row, c.name)) for c in columns]
    return Line(method, category, method in BASELINES, category == OVERALL, cells)


def _interval(row: dict[Any, Any], name: str) -> str:
    """The 95 % interval of a measure; of a speedup also whether it leaves open which of the two is faster."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if _missing(low) or _missing(high):
        return ""
    ends = [_text(end, name) for end in (low, high)]
    spans = OPEN if name.startswith("speedup_") and spans_one(float(str(low)), float(str(high))) else ""
    return spans + "–".join(ends) if ends[0] != ends[1] else ""


def _missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and value != value)


def _text(value: Any, name: str = "") -> str:
    if _missing(value):
        return "–"
    if isinstance(value, float):
        if name in SETTINGS:
            return f"{value:g}"
        return f"{value:,.1f}" if name.startswith("tokens_per_second") else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _value(value: Any) -> str:
    return "" if _missing(value) else repr(value) if isinstance(value, float) else str(value)


@lru_cache(maxsize=1)
def definitions() -> dict[str, str]:
    """The written definition of each column, from docs/concepts.md: the one place that has them."""
    try:
        text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    except OSError:
        return {}
    found: dict[str, str] = {}
    for names, unit, meaning in re.findall(r"^\| (.+?) \| (.*?) ?\| (.+) \|$", text, flags=re.M):
        for name in re.findall(r"`(\w+)`", names):
            plain = meaning.replace("`", "").strip()
            found[name] = f"{plain} ({unit.strip()})" if unit.strip() else plain
    return found
