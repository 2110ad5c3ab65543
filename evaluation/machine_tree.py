"""What `tree=auto` measured, chose and promised, beside what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import answers
from .metrics import measure
from .tables import Run


def chosen(run: Run) -> dict[str, Any] | None:
    """The drafter's own figures in a run's summary; None unless it chose its tree by itself."""
    try:
        told = json.loads((run.folder / "summary.json").read_text(encoding="utf-8")).get("drafter", {})
    except (OSError, ValueError):
        return None
    return told if told.get("predicted_speedup") else None


def achieved(run: Run, runs: Sequence[Run]) -> float:
    """Decoding speed over vanilla's on the questions both have; NaN without such a run."""
    base = next((r for r in runs if r.bench_key == run.bench_key and r.label == "vanilla"), None)
    if base is None:
        return float("nan")
    theirs = {row["question_id"]: row for row in base.answers}
    common = [row for row in run.answers if row["question_id"] in theirs]
    ours = measure(common).tokens_per_second_decode
    return ours / measure([theirs[row["question_id"]] for row in common]).tokens_per_second_decode


def to_lines(runs: Sequence[Run]) -> list[str]:
    """One line a run with tree=auto: the choice, the promise, and what came of it."""
    lines = []
    for run in runs:
        told = chosen(run)
        if told is None:
            continue
        got = achieved(run, runs)
        beside = f"achieved {got:.2f} x" if got == got else "no vanilla run here to compare with"
        aside = "; drafting does not pay here, so it stepped aside" if told["chosen"] == 0 else ""
        lines.append(
            f"{run.label}, {run.settings['bench']['name']}: last choice {told['chosen']} nodes; decoding speed over "
            f"vanilla predicted {told['predicted_speedup']:.2f} x, {beside}{aside}"
        )
    return lines


def write_json(runs: Sequence[Run], path: Path) -> None:
    """The same figures for programs, by run label; nothing is written where no run chose its tree."""
    found = {run.label: told | {"achieved_speedup": achieved(run, runs)} for run in runs if (told := chosen(run))}
    if found:
        answers.write_json(path, found)
