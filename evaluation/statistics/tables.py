"""Build tables: the runs of an experiment as rows, repeats pooled, numbers kept as numbers; and columns' definitions.

columns.yaml defines the columns for terminal, Markdown, LaTeX, page and documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from ..records.rows import Row
from ..records.runs import row_key
from .acceptance import by_depth
from .intervals import Floats, deviation, finite_mean, quotient_interval, row_means, speed_interval
from .metrics import OVERALL, by_subtask, measure, step_ms
from .pools import GROUP, Cells, Pool, paired

AUDITED = ("tokens_equal", "near_ties", "tokens_wrong")  # columns of the audit of a server's answers
TERMINAL, MARKDOWN, PAGE, SETUP = "terminal", "markdown", "page", "setup"  # where a column is shown


@dataclass(frozen=True)
class Column:
    """A column; columns.yaml says what its fields are."""

    name: str
    meaning: str = ""
    unit: str = ""
    title: str = ""
    form: str = ".2f"  # g: a setting
    shown: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        return self.title or self.name

    @property
    def definition(self) -> str:
        """The meaning with its unit, as plain text."""
        return self.meaning.replace("`", "") + (f" ({self.unit})" if self.unit else "")


_DEFINED = yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8"))
COLUMNS, TABLE1 = (
    tuple(Column(**entry | {"shown": tuple(entry.get("shown", ()))}) for entry in _DEFINED[table])
    for table in ("main", "table1")
)
_BY_NAME = {column.name: column for column in COLUMNS}


def column(name: str) -> Column:
    """Return the column of this name; a measure's deviation (NAME_std) and any setting of a method are columns, too."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    base, _, end = name.rpartition("_")
    if end == "std":
        measure = column(base)
        return replace(_BY_NAME["X_std"], name=name, title=f"{measure.title or base} std", form=measure.form)
    return Column(name)


def main_table(pooled: Sequence[Pool]) -> pd.DataFrame:
    """Build one row for each model, bench, method and category; speedups are within the experiment.

    columns.yaml defines the columns; the method's settings follow the measures.
    """
    rows: list[dict[str, Any]] = []
    for pool in pooled:
        for category, answers in by_subtask(pool.rows).items():
            cells = pool.cells.of(category)
            row: dict[str, Any] = {
                **{key: pool.group[key] for key in ("model", "bench")},
                "method": pool.label,
                "variant": pool.variant,
                "category": category,
                "repeats": len(pool.repeats),
                **_measures(cells, answers),
            }
            for name, base in pool.baselines.items():
                row |= speedups(name, cells, base)
            row["break_even_mat"] = _break_even_mat(answers, pool.baselines["vanilla"])
            row["state_bytes"] = pool.first.summary.get("state_bytes", math.nan)
            facets = {f"method_{key}" if key in row else key: value for key, value in pool.identity.facets.items()}
            row |= facets | {"execution": pool.first.execution}
            row |= {f"execution_{name}": base and base.first.execution for name, base in pool.baselines.items()}
            audited = [run.summary.get("audit") or {} for run in pool.runs] if category == OVERALL else [{}]
            row |= {name: sum(counts[name] for counts in audited) for name in AUDITED} if all(audited) else {}
            rows.append(row | pool.group | {"complete": all(run.complete for run in pool.runs)})
    return pd.DataFrame(rows)


def depths_table(pooled: Sequence[Pool]) -> pd.DataFrame:
    """Build acceptance by depth of every method that drafts, all questions together."""
    rows: list[dict[str, Any]] = []
    for pool in pooled:
        for depth in by_depth(pool.accepted):
            shares = {"joint_acceptance": depth.joint, "conditional_acceptance": depth.conditional}
            rows.append(identity(pool) | {"depth": depth.depth, "steps": depth.steps} | shares)
    return pd.DataFrame(rows)


def identity(pool: Pool) -> dict[str, Any]:
    """Return the columns that identify a configuration in the tables other than the main one."""
    group = {key: pool.group[key] for key in ("model", "dtype", "bench", "bench_questions")}
    return group | {"method": pool.label, "variant": pool.variant}


def _measures(cells: Cells, answers: Sequence[Row]) -> dict[str, Any]:
    """Return the measures of a category, with deviation and interval of MAT and tokens/s."""
    measures = measure(answers)
    measures["questions"] = len(cells.questions)
    measures["tokens_per_second"] = finite_mean(row_means(cells.speed))  # mean of the questions' means over repeats
    tokens, steps = np.nansum(cells.tokens, axis=1), np.nansum(cells.steps, axis=1)
    sums = zip(np.nansum(cells.tokens, axis=0), np.nansum(cells.steps, axis=0), strict=True)
    by_repeat = {
        "mat": [t / s if s else math.nan for t, s in sums],
        "tokens_per_second": [finite_mean(speeds) for speeds in cells.speed.T],
    }
    intervals = {
        "mat": quotient_interval(np.where(steps > 0, tokens, np.nan), steps),
        "tokens_per_second": speed_interval(cells.speed, np.ones_like(cells.speed)),
    }
    for key, (low, high) in intervals.items():
        measures |= {f"{key}_std": deviation(by_repeat[key]), f"{key}_low": low, f"{key}_high": high}
    return measures


def speedups(name: str, cells: Cells, base: Pool | None) -> dict[str, float]:
    """Return the speedup over a baseline on common questions, and on common repeats if there are several."""
    keys = [f"speedup_{name}{end}" for end in ("", "_std", "_low", "_high")]
    if base is None:
        return dict.fromkeys(keys, math.nan)
    cells, base_cells = paired(cells, base.cells)
    both = [repeat for repeat in cells.repeats if repeat in base_cells.repeats]
    speeds, base_speeds = (c.speed[:, [c.repeats.index(repeat) for repeat in both]] for c in (cells, base_cells))
    ratios = [speedup(speeds[:, [i]], base_speeds[:, [i]]) for i in range(len(both))]
    if len(both) < 2:
        speeds, base_speeds = (row_means(c.speed)[:, None] for c in (cells, base_cells))
    value = speedup(speeds, base_speeds)
    return dict(zip(keys, (value, deviation(ratios), *speed_interval(speeds, base_speeds)), strict=True))


def _break_even_mat(answers: Sequence[Row], plain: Pool | None) -> float:
    """Return the time of these answers' steps over that of plain steps for the same questions; NaN where not timed."""
    theirs = plain.rows if plain else []
    both = {row_key(row) for row in answers} & {row_key(row) for row in theirs}
    own_ms, plain_ms = (step_ms([row for row in rows if row_key(row) in both]) for rows in (answers, theirs))
    return own_ms / plain_ms if plain_ms else math.nan


def speedup(speeds: Floats, base: Floats) -> float:
    """Return the mean speed over the other's, on the questions and repeats that have both: (n, R) and (n, R)."""
    both = np.isfinite(speeds) & np.isfinite(base)
    mean, base_mean = (finite_mean(row_means(np.where(both, values, np.nan))) for values in (speeds, base))
    return mean / base_mean


def block_names(keys: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], str]:
    """Name blocks, given by their values of GROUP: by model and bench, and by what else distinguishes them."""
    keys = list(dict.fromkeys(keys))
    forms = {3: "{} questions", 4: "questions #{}", 5: "max_new_tokens {}"}  # by index in GROUP
    names = {}
    for key in keys:
        words = [str(key[0]), str(key[2])]
        twins = [other for other in keys if other != key and (other[0], other[2]) == (key[0], key[2])]
        for i, value in enumerate(key):
            if i == 4:  # the hash is named only if the number of questions is the same
                twins = [other for other in twins if other[3] == key[3]]
            if any(other[i] != value for other in twins):
                words.append(forms.get(i, "{}").format(value))
        names[key] = ", ".join(words)
    return names


def blocks(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the blocks of the main table by their names."""
    rows = {tuple(key): block for key, block in table.groupby(list(GROUP), sort=False)}
    names = block_names(rows)
    return {names[key]: block for key, block in rows.items()}


def unavailable(why: str) -> str:
    """Return the words of every table for a job that could not run."""
    return f"not available: {why}"


def with_unavailable(table: pd.DataFrame, left_out: Sequence[dict[str, str]]) -> pd.DataFrame:
    """Return the main table with a row for each method that a sweep left out, by its model, bench and method.

    The row is in the block of its model and bench: in each block if there are several (another type or device), in its
    own block if there is none. Counts are 0, measures are empty, and the column `note` says why. A method that was
    measured since has no such row. Without such rows, the table is returned unchanged.
    """
    rows: list[dict[Any, Any]] = []
    empty_row = {name: {"b": False, "i": 0, "f": math.nan}.get(table[name].dtype.kind) for name in table.columns}
    empty_block: dict[Any, Any] = {key: "" if empty_row[key] is None else empty_row[key] for key in GROUP}
    for entry in left_out:
        row = {key: entry[key] for key in ("model", "bench", "method")}
        same = table[(table["model"] == row["model"]) & (table["bench"] == row["bench"])]
        methods = same["method"].astype(str).str.split(" (", regex=False).str[0]  # without their starts
        if not (methods == row["method"]).any():
            row |= {"category": OVERALL, "note": unavailable(entry["why"])}
            its_blocks = same[list(GROUP)].drop_duplicates().to_dict("records")
            rows += [empty_row | block | row for block in its_blocks or [empty_block]]
    if not rows:
        return table
    below = pd.DataFrame(rows).astype({name: table[name].dtype for name in table.columns})
    return pd.concat([table.assign(note=None), below], ignore_index=True)
