"""Tables: the runs of an experiment as rows, repeats pooled, numbers kept as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from .intervals import deviation, ratio_interval
from .metrics import OVERALL, Row, by_subtask, measure
from .runs import METHODS, Pool, Run, mixed, pools, read_runs

__all__ = ["BASELINES", "METHODS", "SHOWN", "Pool", "Run", "main_table", "mixed", "pools", "read_runs"]

BASELINES = ("hf", "vanilla")
SHOWN = ("method", "category", "questions", "new_tokens", "mat", "mat_macro", "tokens_per_second")
GROUP = ["model", "dtype", "bench", "bench_questions", "max_new_tokens", "device"]  # one block of a table, one figure


def main_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row for each model, bench, method and category, repeats pooled; speedups are against runs of the same folder.

    Columns: counts are sums over repeats but for `questions`; X_std is over repeats, X_low and X_high are the 95 %
    bootstrap interval over questions (docs/metrics.md); then the settings of the method.
    """
    pooled = pools(runs)
    rows: list[dict[str, Any]] = []
    for pool in pooled:
        settings = pool.first.settings
        bases = {name: baseline(pool, name, pooled) for name in BASELINES}
        for category, answers in by_subtask(pool.rows).items():
            row: dict[str, Any] = {
                "model": settings["model"]["name"],
                "bench": settings["bench"]["name"],
                "method": pool.label,
                "variant": pool.variant,
                "category": category,
                "repeats": len(pool.runs),
                **figures(pool, category, answers),
            }
            for name, base in bases.items():
                row |= speedups(name, pool, base, category)
            row["state_bytes"] = pool.first.summary.get("state_bytes", math.nan)
            row |= pool.first.facets
            row |= {
                "dtype": settings["model"]["dtype"],
                "max_new_tokens": settings["max_new_tokens"],
                "bench_questions": settings["bench"].get("questions", len(pool.first.answers)),
                "device": pool.first.metadata["device"],
                "complete": pool.complete,
            }
            rows.append(row)
    return pd.DataFrame(rows)


def baseline(pool: Pool, name: str, pooled: Sequence[Pool]) -> Pool | None:
    """The baseline's runs to compare with: same model, bench and device, and the same execution where it has one."""
    found = [p for p in pooled if p.label == name and p.first.bench_key == pool.first.bench_key]
    facets = pool.first.facets
    same = [p for p in found if all(p.first.facets[key] == facets[key] for key in ("execution", "phases"))]
    if same or name != "hf":
        return same[0] if same else None
    return found[0] if found else None


def figures(pool: Pool, category: str, answers: Sequence[Row]) -> dict[str, Any]:
    """The measures of a category, with deviation and interval of MAT and tokens/s."""
    found = asdict(measure(answers))
    own = questions_of(pool, category)
    found["questions"] = len(own)
    found["tokens_per_second"] = _mean(own["speed"])  # of the questions' own means over their repeats
    repeats = [questions_of(run, category) for run in pool.runs]
    ones = np.ones(len(own))
    spread = {
        "mat": (
            [r["tokens"].sum() / r["steps"].sum() if r["steps"].sum() else math.nan for r in repeats],
            ratio_interval(own["tokens"].where(own["steps"] > 0), own["steps"]),
        ),
        "tokens_per_second": ([_mean(r["speed"]) for r in repeats], ratio_interval(own["speed"], ones)),
    }
    for key, (values, (low, high)) in spread.items():
        found |= {f"{key}_std": deviation(values), f"{key}_low": low, f"{key}_high": high}
    return found


def speedups(name: str, pool: Pool, base: Pool | None, category: str) -> dict[str, float]:
    """The speedup over a baseline on the questions both have, paired by question; deviation over paired repeats."""
    keys = [f"speedup_{name}{end}" for end in ("", "_std", "_low", "_high")]
    if base is None:
        return dict.fromkeys(keys, math.nan)
    value, interval = ratio(questions_of(pool, category), questions_of(base, category))
    others = {run.repeat: run for run in base.runs}
    ratios = [
        ratio(questions_of(run, category), questions_of(others[run.repeat], category))[0]
        for run in (pool.runs if len(pool.runs) > 1 else ())
        if run.repeat in others
    ]
    return dict(zip(keys, (value, deviation(ratios), *interval), strict=True))


def questions_of(runs: Run | Pool, category: str) -> pd.DataFrame:
    """The questions of a category, by id: tokens, steps, speed."""
    own = runs.by_question
    return own if category == OVERALL else own[own["subtask"].to_numpy() == category]


def ratio(own: pd.DataFrame, theirs: pd.DataFrame) -> tuple[float, tuple[float, float]]:
    """Mean speed over the other's mean speed on the questions that both have, and its interval."""
    mine = own["speed"].to_numpy()
    base = theirs["speed"].reindex(own.index).to_numpy()
    both = np.isfinite(mine) & np.isfinite(base)
    if not both.any():
        return math.nan, (math.nan, math.nan)
    return float(mine[both].mean() / base[both].mean()), ratio_interval(mine[both], base[both])


def _mean(values: pd.Series[float]) -> float:
    return float(values.mean())  # pandas leaves NaN out
