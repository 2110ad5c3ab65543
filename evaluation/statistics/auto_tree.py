"""What `tree=auto` and `tree=online` measured, chose and promised, beside what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from model.files import write_json

from ..records.rows import Row
from ..records.runs import Run, row_key
from .metrics import measure
from .pools import Pool, pools
from .tables import baseline


def told_by(run: Run) -> dict[str, Any] | None:
    """The drafter's own figures in a run's summary; None unless it chose its tree by itself."""
    told: dict[str, Any] = run.summary.get("drafter") or {}
    return told if told.get("predicted_speedup") else None


class AutoRun(NamedTuple):
    """A run with such a tree: what the drafter told, and its decoding speed over vanilla's on what both answered."""

    pool: Pool
    repeat: int
    run: Run
    told: dict[str, Any]
    achieved: float


def auto_runs(pooled: Sequence[Pool]) -> Iterator[AutoRun]:
    """Every such run, against the same repeat of vanilla where that has the question; NaN without vanilla."""
    for pool in pooled:
        for repeat, shards in pool.repeats.items():
            for run in shards:
                if (told := told_by(run)) is not None:
                    base = baseline(pool, "vanilla", pooled)
                    yield AutoRun(pool, repeat, run, told, _speedup(run, base.answers_beside(repeat) if base else {}))


def _speedup(run: Run, theirs: dict[str, Row]) -> float:
    common = [row for row in run.answers if row_key(row) in theirs]
    base = [theirs[row_key(row)] for row in common]
    return measure(common).tokens_per_second_decode / measure(base).tokens_per_second_decode if common else math.nan


def to_lines(runs: Sequence[Run]) -> list[str]:
    """One line a run with such a tree: the choice, the promise, and what came of it."""
    lines = []
    for pool, repeat, run, told, achieved in auto_runs(pools(runs)):
        beside = f"achieved {achieved:.2f} x" if achieved == achieved else "no vanilla run here to compare with"
        aside = "; drafting does not pay here, so it stepped aside" if told["chosen"] == 0 else ""
        chosen = f"{told.get('choice', 'last choice')} {told['chosen']} nodes"
        name = pool.name + (f", repeat {repeat}" if len(pool.repeats) > 1 else "")
        lines.append(
            f"{name}, {run.settings['bench']['name']}: {chosen}; decoding speed over "
            f"vanilla predicted {told['predicted_speedup']:.2f} x, {beside}{aside}"
        )
    return lines


def write_auto_runs(runs: Sequence[Run], path: Path) -> None:
    """The same figures for programs, one object a run; nothing is written where no run chose its tree."""
    found = [
        {"method": pool.name, "bench": pool.group["bench"], "repeat": repeat, "run": run.folder.name}
        | told
        | {"achieved_speedup": achieved}
        for pool, repeat, run, told, achieved in auto_runs(pools(runs))
    ]
    if found:
        write_json(path, found)
