"""Build tables: the runs of an experiment as rows, repeats pooled, numbers kept as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from ..records.rows import Row
from ..statistics.acceptance import by_depth
from ..statistics.intervals import Floats, deviation, quotient, quotient_interval, speed_interval
from ..statistics.metrics import OVERALL, by_subtask, mean, measure
from ..statistics.pools import Cells, Pool, paired

# columns of the audit of a server's answers
AUDITED = ("tokens_equal", "near_ties", "tokens_wrong")
# where a column is shown
TERMINAL = "terminal"
MARKDOWN = "markdown"
PAGE = "page"


@dataclass(frozen=True)
class Column:
    """A column, as columns.yaml defines it."""

    name: str
    meaning: str = ""
    unit: str = ""
    title: str = ""
    form: str = ".2f"  # g: a setting
    shown: Sequence[str] = ()

    @property
    def heading(self) -> str:
        return self.title or self.name

    @property
    def definition(self) -> str:
        unit = f" ({self.unit})" if self.unit else ""
        return self.meaning.replace("`", "") + unit


_DEFINED = yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8"))


COLUMNS = tuple(Column(**entry) for entry in _DEFINED["main"])
TABLE1 = tuple(Column(**entry) for entry in _DEFINED["table1"])
_BY_NAME = {column.name: column for column in COLUMNS}


def column(name: str) -> Column:
    """Return the column of this name, such as NAME_std or a setting of a method."""
    if name in _BY_NAME:
        return _BY_NAME[name]

    base, _, end = name.rpartition("_")
    if end != "std":
        return Column(name)
    measure = column(base)
    title = f"{measure.title or base} std"
    return replace(_BY_NAME["X_std"], name=name, title=title, form=measure.form)


def main_table(pooled: Sequence[Pool]) -> pd.DataFrame:
    """Build one row for each model, bench, method and category.

    Speedups are within the experiment. The index is the names of the rows' blocks.
    """
    rows: list[dict[str, Any]] = []
    names = []
    for pool in pooled:
        for category, answers in by_subtask(pool.rows).items():
            rows.append(_main_row(pool, category, answers))
            names.append(pool.block_name)

    return pd.DataFrame(rows, index=names)


def _main_row(pool: Pool, category: str, answers: Sequence[Row]) -> dict[str, Any]:
    cells = pool.cells.of(category)
    speeds = pool.speeds.of(category)
    row: dict[str, Any] = {
        "model": pool.block["model"],
        "bench": pool.block["bench"],
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

    for key, value in pool.first.facets.items():
        column = f"method_{key}" if key in row else key
        row[column] = value
    row["execution"] = pool.first.execution
    row["num_choices"] = pool.first.settings.get("num_choices")
    row["quantize"] = pool.first.quantized
    for name, base in pool.baselines.items():
        row[f"execution_{name}"] = base and base.first.execution

    if category == OVERALL:
        row |= _audited(pool)
    row |= pool.block
    row["complete"] = all(run.complete for run in pool.runs)
    return row


def _audited(pool: Pool) -> dict[str, int]:
    """Return the counts of AUDITED; none unless all runs were audited and had ids to judge."""
    audits = [run.summary.get("audit") for run in pool.runs]
    if not all(audits):
        return {}

    counts = pd.DataFrame(audits, columns=list(AUDITED)).sum()
    return dict(counts) if counts.any() else {}


def depths_table(pooled: Sequence[Pool]) -> pd.DataFrame:
    """Build acceptance by depth of every method that drafts, over all questions."""
    rows: list[dict[str, Any]] = []
    for pool in pooled:
        for depth in by_depth(pool.accepted):
            rows.append(pool.columns | depth._asdict())

    shares = {"joint": "joint_acceptance", "conditional": "conditional_acceptance"}
    return pd.DataFrame(rows).rename(columns=shares)


def _measures(cells: Cells, speeds: Cells, answers: Sequence[Row]) -> dict[str, Any]:
    measures = measure(answers)
    measures["questions"] = len(cells.questions)

    # MAT; its interval is over questions alone
    counts = [cells.values["tokens"], cells.values["steps"]]  # (n, R) each
    tokens, steps = (np.nansum(count, axis=1) for count in counts)
    steps[steps == 0] = np.nan  # not known in any repeat
    measures["mat_macro"] = mean((tokens / steps)[steps > 0].tolist())
    measures |= rate("mat", counts, alike=False)
    measures["mat_low"], measures["mat_high"] = quotient_interval(tokens, steps)

    # tokens/s: of single questions, the mean of their speeds
    single = speeds.size == 1
    columns = list(speeds.values.values())
    if single:
        columns.append(np.where(np.isfinite(columns[0]), 1.0, np.nan))
    measures |= rate("tokens_per_second", columns, alike=single)
    if not single:
        measures["tokens_per_second_total"] = measures["tokens_per_second"]
    return measures


def rate(name: str, columns: Sequence[Floats], *, alike: bool) -> dict[str, float]:
    """Return a `quotient` with its deviation over repeats and its interval, as columns.

    Args:
        columns: two or four, (n, R).
        alike: as `quotient` takes it.
    """
    by_repeat = []
    for repeat in range(columns[0].shape[1]):
        of_repeat = [column[:, [repeat]] for column in columns]
        by_repeat.append(quotient(*of_repeat))

    low, high = speed_interval(*columns, alike=alike)
    return {
        name: quotient(*columns, alike=alike),
        f"{name}_std": deviation(by_repeat),
        f"{name}_low": low,
        f"{name}_high": high,
    }


def speedups(name: str, speeds: Cells, base: Pool | None) -> dict[str, float]:
    """Return the speedup over a baseline of the same batch size.

    It is over the questions (whole batches) that both have.
    """
    column = f"speedup_{name}"
    if base is None or base.speeds.size != speeds.size:
        names = [f"{column}{end}" for end in ("", "_std", "_low", "_high")]
        return dict.fromkeys(names, math.nan)

    columns = paired(speeds, base.speeds, *speeds.values)
    return rate(column, columns, alike=speeds.size == 1)


def _break_even_mat(cells: Cells, plain: Pool | None) -> float:
    """Return the time of a step over that of a plain step, where both are timed; NaN if nowhere."""
    if plain is None:
        return math.nan
    return quotient(*paired(cells, plain.cells, "later_seconds", "later_steps"))


def blocks(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {str(name): rows for name, rows in table.groupby(level=0, sort=False)}
