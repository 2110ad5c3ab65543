"""Tables: the runs of an experiment as rows, repeats pooled, numbers kept as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from ..records.drawing import COLUMNS
from ..records.rows import Row
from ..records.runs import Run
from .intervals import Floats, deviation, ratio_interval, speed_interval
from .metrics import OVERALL, by_subtask, measure
from .pools import Cells, Pool, closest, paired, pools

BASELINES = ("hf", "vanilla")
SHOWN = ("method", "category", "questions", "new_tokens", "mat", "mat_macro", "tokens_per_second")
# One block of a table, one figure.
GROUP = ["model", "dtype", "bench", "bench_questions", "questions_sha256", "max_new_tokens", "device"]


def main_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row for each model, bench, method and category, repeats pooled; speedups are against runs of the same folder.

    Columns: counts are sums over repeats but for `questions`; X_std is over repeats, X_low and X_high are the 95 %
    bootstrap interval (docs/concepts.md); then the settings of the method.
    """
    pooled = pools(runs)
    rows: list[dict[str, Any]] = []
    for pool in pooled:
        bases = {name: baseline(pool, name, pooled) for name in BASELINES}
        pairs = {name: None if base is None else paired(pool.cells, base.cells) for name, base in bases.items()}
        for category, answers in by_subtask(pool.rows).items():
            row: dict[str, Any] = {
                **{key: pool.group[key] for key in ("model", "bench")},
                "method": pool.label,
                "variant": pool.variant,
                "category": category,
                "repeats": len(pool.repeats),
                **measures_of(pool, category, answers),
            }
            for name, pair in pairs.items():
                row |= speedups(name, pair, category)
            row["state_bytes"] = pool.first.summary.get("state_bytes", math.nan)
            row |= pool.first.facets | {"execution": pool.first.execution}
            row |= {f"execution_{name}": base and base.first.execution for name, base in bases.items()}
            row |= pool.group | {"complete": pool.complete}
            rows.append(row)
    return pd.DataFrame(rows)


DRAWN = tuple(COLUMNS.values())  # how a run's tokens were drawn
KIND = ("execution", "phases", "timed", *DRAWN)  # how its steps were taken, and whether their time says anything


def baseline(pool: Pool, name: str, pooled: Sequence[Pool]) -> Pool | None:
    """The baseline's runs to compare with: of those of the same model, bench file and device, and of the same execution
    where it has one, those that have most questions in common; None where none has any.
    """
    found = [p for p in pooled if p.label == name and alike(p, pool, DRAWN)]
    same = [p for p in found if alike(p, pool, KIND)]
    best = closest(pool, same)
    return closest(pool, found) if best is None and name == "hf" else best


def alike(pool: Pool, other: Pool, keys: Iterable[str]) -> bool:
    """Whether two configurations have these facets in common."""
    return all(pool.first.facets.get(key) == other.first.facets.get(key) for key in keys)


def about(pool: Pool) -> dict[str, Any]:
    """What names a configuration in the tables beside the main one."""
    group = {key: pool.group[key] for key in ("model", "dtype", "bench", "bench_questions")}
    return group | {"method": pool.label, "variant": pool.variant}


def measures_of(pool: Pool, category: str, answers: Sequence[Row]) -> dict[str, Any]:
    """The measures of a category, with deviation and interval of MAT and tokens/s."""
    found = asdict(measure(answers))
    own = pool.cells.of(category)
    found["questions"] = len(own.questions)
    found["tokens_per_second"] = _mean(own.mean_speed())  # of the questions' own means over their repeats
    tokens, steps = np.nansum(own.tokens, axis=1), np.nansum(own.steps, axis=1)
    mats = [t / s if s else math.nan for t, s in zip(_sums(own.tokens), _sums(own.steps), strict=True)]
    spread = {
        "mat": (mats, ratio_interval(np.where(steps > 0, tokens, np.nan), steps)),
        "tokens_per_second": ([_mean(v) for v in own.speed.T], speed_interval(own.speed, np.ones_like(own.speed))),
    }
    for key, (values, (low, high)) in spread.items():
        found |= {f"{key}_std": deviation(values), f"{key}_low": low, f"{key}_high": high}
    return found


def speedups(name: str, pair: tuple[Cells, Cells] | None, category: str) -> dict[str, float]:
    """The speedup over a baseline on the questions both have; deviation and interval from the repeats both have."""
    keys = [f"speedup_{name}{end}" for end in ("", "_std", "_low", "_high")]
    if pair is None:
        return dict.fromkeys(keys, math.nan)
    own, theirs = pair if category == OVERALL else (cells.take(pair[0].subtasks == category) for cells in pair)
    both = [repeat for repeat in own.repeats if repeat in theirs.repeats]
    mine, base = own.columns(both), theirs.columns(both)
    ratios = [speedup(a, b) for a, b in zip(mine.T, base.T, strict=True)]
    if len(both) < 2:
        mine, base = own.mean_speed()[:, None], theirs.mean_speed()[:, None]
    value = speedup(own.mean_speed(), theirs.mean_speed())
    return dict(zip(keys, (value, deviation(ratios), *speed_interval(mine, base)), strict=True))


def speedup(own: Floats, base: Floats) -> float:
    """Mean speed over the other's, on the questions that have both: (n,) and (n,)."""
    both = np.isfinite(own) & np.isfinite(base)
    return float(own[both].mean() / base[both].mean()) if both.any() else math.nan


def drift_unknown(table: pd.DataFrame) -> bool:
    """Whether an interval of a speed comes from one repeat, so that it is over questions only."""
    speeds = [c for c in ("tokens_per_second", *(f"speedup_{b}" for b in BASELINES)) if f"{c}_std" in table]
    return any(bool((table[f"{c}_std"].isna() & (table[f"{c}_low"] < table[f"{c}_high"])).any()) for c in speeds)


def _sums(cells: Floats) -> list[float]:
    return list(np.nansum(cells, axis=0))


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
