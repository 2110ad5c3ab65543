"""What `tree=auto` measured, chose and promised, beside what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from model.files import write_json

from ..records.runs import Run, row_key
from .metrics import measure
from .pools import Pool, pools
from .tables import baseline


def chosen(run: Run) -> dict[str, Any] | None:
    """The drafter's own figures in a run's summary; None unless it chose its tree by itself."""
    told: dict[str, Any] = run.summary.get("drafter") or {}
    return told if told.get("predicted_speedup") else None


def choices(pooled: Sequence[Pool]) -> Iterator[tuple[Pool, int, Run, dict[str, Any]]]:
    """Every run with tree=auto: its configuration, its repeat, itself, and the drafter's own figures."""
    for pool in pooled:
        for repeat, shards in pool.repeats.items():
            for run in shards:
                if (told := chosen(run)) is not None:
                    yield pool, repeat, run, told


def achieved(run: Run, repeat: int, base: Pool | None) -> float:
    """Decoding speed over vanilla's on the questions both have, of the same repeat where both have it; NaN without."""
    if base is None:
        return math.nan
    theirs = base.answers_beside(repeat)
    common = [row for row in run.answers if row_key(row) in theirs]
    ours = measure(common).tokens_per_second_decode
    return ours / measure([theirs[row_key(row)] for row in common]).tokens_per_second_decode


def to_lines(runs: Sequence[Run]) -> list[str]:
    """One line a run with tree=auto: the choice, the promise, and what came of it."""
    pooled = pools(runs)
    lines = []
    for pool, repeat, run, told in choices(pooled):
        got = achieved(run, repeat, baseline(pool, "vanilla", pooled))
        beside = f"achieved {got:.2f} x" if got == got else "no vanilla run here to compare with"
        aside = "; drafting does not pay here, so it stepped aside" if told["chosen"] == 0 else ""
        name = pool.name + (f", repeat {repeat}" if len(pool.repeats) > 1 else "")
        lines.append(
            f"{name}, {run.settings['bench']['name']}: last choice {told['chosen']} nodes; decoding speed over "
            f"vanilla predicted {told['predicted_speedup']:.2f} x, {beside}{aside}"
        )
    return lines


def write_choices(runs: Sequence[Run], path: Path) -> None:
    """The same figures for programs, one object a run; nothing is written where no run chose its tree."""
    pooled = pools(runs)
    found = [
        {"method": pool.name, "bench": pool.block["bench"], "repeat": repeat, "run": run.folder.name}
        | told
        | {"achieved_speedup": achieved(run, repeat, baseline(pool, "vanilla", pooled))}
        for pool, repeat, run, told in choices(pooled)
    ]
    if found:
        write_json(path, found)
