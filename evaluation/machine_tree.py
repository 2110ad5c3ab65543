"""What `tree=auto` measured, chose and promised, beside what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .metrics import measure
from .tables import Run


def chosen(run: Run) -> dict[str, Any] | None:
    """The drafter's own figures in a run's summary; None unless it chose its tree by itself."""
    try:
        told = json.loads((run.folder / "summary.json").read_text(encoding="utf-8")).get("drafter", {})
    except (OSError, ValueError):
        return None
    return told if told.get("predicted_speedup") else None


def achieved(run: Run, runs: list[Run]) -> float:
    """Decoding speed over vanilla's on the questions both have; NaN without such a run."""
    base = next((r for r in runs if r.bench_key == run.bench_key and r.label == "vanilla"), None)
    if base is None:
        return float("nan")
    theirs = {row["question_id"]: row for row in base.answers}
    common = [row for row in run.answers if row["question_id"] in theirs]
    ours = measure(common).tokens_per_second_decode
    return ours / measure([theirs[row["question_id"]] for row in common]).tokens_per_second_decode


def to_lines(runs: list[Run]) -> list[str]:
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


def draw(run: Run, runs: list[Run], note: str) -> Figure:
    """Step time over the size of the tree, and the speed that it promises, the last choice marked."""
    told = chosen(run)
    assert told is not None, "drawn for runs that chose their tree"
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.0, 2.6), layout="constrained")
    sizes = told["sizes"]
    left.plot(sizes, [1e3 * s for s in told["step_seconds"]], color="#0072B2", marker="o", markersize=3)
    left.set_ylabel("milliseconds a step")
    left.set_ylim(bottom=0)
    right.plot(sizes, told["predicted_speedup_by_size"], color="#009E73", marker="o", markersize=3, label="predicted")
    at = sizes.index(told["chosen"])
    right.plot(sizes[at], told["predicted_speedup_by_size"][at], "o", color="#D55E00", label="last choice")
    got = achieved(run, runs)
    if got == got:
        right.axhline(got, color="#444444", linewidth=0.8, linestyle=":", label="achieved over the run")
    right.set_ylabel("decoding speed over vanilla")
    right.set_ylim(bottom=0)
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.set_xlabel("nodes below the root")
    figure.supxlabel(note, fontsize=6, color="#666666", x=0.99, ha="right")
    return figure


def write_json(runs: list[Run], path: Path) -> None:
    """The same figures for programs, by run label; nothing is written where no run chose its tree."""
    found = {run.label: told | {"achieved_speedup": achieved(run, runs)} for run in runs if (told := chosen(run))}
    if found:
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
