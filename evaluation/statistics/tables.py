"""Build tables: the runs of an experiment as rows, repeats pooled, numbers kept as numbers; and
columns' definitions.

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
from .acceptance import by_depth
from .intervals import Floats, deviation, quotient, quotient_interval, speed_interval
from .metrics import OVERALL, by_subtask, mean, measure
from .pools import GROUP, Cells, Pool, paired

# columns of the audit of a server's answers
AUDITED = (
    "tokens_equal",
    "near_ties",
    "tokens_wrong",
)
# where a column is shown
TERMINAL = "terminal"
MARKDOWN = "markdown"
PAGE = "page"
SETUP = "setup"


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
    """Return the column of this name; a measure's deviation (NAME_std) and any setting of a method
    are columns, too.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    base, _, end = name.rpartition("_")
    if end == "std":
        measure = column(base)
        return replace(
            _BY_NAME["X_std"], name=name, title=f"{measure.title or base} std", form=measure.form
        )
    return Column(name)


def main_table(pooled: Sequence[Pool]) -> pd.DataFrame:
    """Build one row for each model, bench, method and category; speedups are within the experiment.

    columns.yaml defines the columns; the method's settings follow the measures.
    """
    rows: list[dict[str, Any]] = []
    for pool in pooled:
        for category, answers in by_subtask(pool.rows).items():
            cells = pool.cells.of(category)
            speeds = pool.speeds.of(category)
            row: dict[str, Any] = {
                **{key: pool.group[key] for key in ("model", "bench")},
                "method": pool.label,
                "variant": pool.variant,
                "category": category,
                "repeats": len(pool.repeats),
                **_measures(cells, speeds, answers),
            }
            for name, base in pool.baselines.items():
                row |= speedups(name, speeds, base)
            row["break_even_mat"] = _break_even_mat(cells, pool.baselines["vanilla"])
            row["state_bytes"] = pool.first.summary.get("state_bytes", math.nan)
            facets = {
                f"method_{key}" if key in row else key: value
                for key, value in pool.identity.facets.items()
            }
            row |= facets | {"execution": pool.first.execution}
            row |= {
                "num_choices": pool.first.settings.get("num_choices"),
                "quantize": pool.first.quantized,
            }
            row |= {
                f"execution_{name}": base and base.first.execution
                for name, base in pool.baselines.items()
            }
            audited = (
                [run.summary.get("audit") or {} for run in pool.runs]
                if category == OVERALL
                else [{}]
            )
            if all(audited):
                counts = {name: sum(audit[name] for audit in audited) for name in AUDITED}
                row |= counts if any(counts.values()) else {}  # else nothing had ids to judge
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


def _measures(cells: Cells, speeds: Cells, answers: Sequence[Row]) -> dict[str, Any]:
    """Return the measures of a category, with deviation and interval of MAT and tokens/s."""
    measures = measure(answers)
    measures["questions"] = len(cells.questions)
    counts = [cells.values[name] for name in ("tokens", "steps")]
    tokens, steps = (np.nansum(count, axis=1) for count in counts)
    steps[steps == 0] = np.nan  # not known in any repeat
    measures["mat_macro"] = mean((tokens / steps)[steps > 0].tolist())
    low, high = quotient_interval(tokens, steps)
    # over questions alone
    measures |= rate("mat", counts, alike=False) | {
        "mat_low": low,
        "mat_high": high,
    }
    columns = [*speeds.values.values()]
    if speeds.size == 1:
        columns.append(np.where(np.isfinite(columns[0]), 1.0, np.nan))  # the mean of the speeds
    measures |= rate("tokens_per_second", columns, alike=speeds.size == 1)
    if speeds.size > 1:
        measures["tokens_per_second_total"] = measures["tokens_per_second"]
    return measures


def rate(name: str, columns: Sequence[Floats], *, alike: bool) -> dict[str, float]:
    """Return a `quotient` with its deviation over repeats and its interval, as columns of that
    name.

    Args:
        columns: two or four, (n, R).
        alike: as `quotient` takes it.
    """
    repeats = range(columns[0].shape[1])
    by_repeat = [quotient(*(column[:, [i]] for column in columns)) for i in repeats]
    low, high = speed_interval(*columns, alike=alike)
    value = quotient(*columns, alike=alike)
    spread = deviation(by_repeat)
    return {name: value, f"{name}_std": spread, f"{name}_low": low, f"{name}_high": high}


def speedups(name: str, speeds: Cells, base: Pool | None) -> dict[str, float]:
    """Return the speedup over a baseline of the same batch size, on the questions (whole batches)
    that both have.
    """
    if base is None or base.speeds.size != speeds.size:
        return dict.fromkeys(
            [f"speedup_{name}{end}" for end in ("", "_std", "_low", "_high")], math.nan
        )
    columns = paired(speeds, base.speeds, *speeds.values)
    return rate(f"speedup_{name}", columns, alike=speeds.size == 1)


def _break_even_mat(cells: Cells, plain: Pool | None) -> float:
    """Return the time of a step over that of a plain step, where both are timed; NaN if nowhere."""
    return (
        quotient(*paired(cells, plain.cells, "later_seconds", "later_steps")) if plain else math.nan
    )


def block_names(keys: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], str]:
    """Name blocks, given by their values of GROUP: by model and bench, and by what else
    distinguishes them.
    """
    keys = list(dict.fromkeys(keys))
    forms = {3: "{} questions", 4: "questions #{}", 5: "max_new_tokens {}"}  # by index in GROUP
    names = {}
    for key in keys:
        words = [str(key[0]), str(key[2])]
        twins = [
            other for other in keys if other != key and (other[0], other[2]) == (key[0], key[2])
        ]
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
    """Return the main table with a row for each method that a sweep left out, by its model, bench
    and method.

    The row is in the block of its model and bench: in each block if there are several (another type
    or device), in its
    own block if there is none. Counts are 0, measures are empty, and the column `note` says why. A
    method that was measured since has no such row. Without such rows, the table is returned
    unchanged.
    """
    rows: list[dict[Any, Any]] = []
    empty_row = {
        name: {"b": False, "i": 0, "f": math.nan}.get(table[name].dtype.kind)
        for name in table.columns
    }
    empty_block: dict[Any, Any] = {
        key: "" if empty_row[key] is None else empty_row[key] for key in GROUP
    }
    for entry in left_out:
        row = {key: entry[key] for key in ("model", "bench", "method")}
        same = table[(table["model"] == row["model"]) & (table["bench"] == row["bench"])]
        # without their starts
        methods = same["method"].astype(str).str.split(" (", regex=False).str[0]
        if not (methods == row["method"]).any():
            row |= {"category": OVERALL, "note": unavailable(entry["why"])}
            its_blocks = same[list(GROUP)].drop_duplicates().to_dict("records")
            rows += [empty_row | block | row for block in its_blocks or [empty_block]]
    if not rows:
        return table
    below = pd.DataFrame(rows).astype({name: table[name].dtype for name in table.columns})
    return pd.concat([table.assign(note=None), below], ignore_index=True)
