"""What drafting costs and when it pays: the parts of a step, budgets of nodes, repetition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from ..records.rows import accept_lengths
from ..statistics.metrics import repetition
from ..statistics.pools import BUDGETS, mat_ratio
from .figure_data import MOST, TREE, FigureData, counted, largest
from .style import band, colour, finish, mark, panels, sideways

PHASES = ("draft", "forward", "verify", "commit", "observe", "loop", "step")
PHASE_NAMES = {"observe": "update", "step": "whole step"}
REFERENCE = "recycling"  # the method whose MAT the others are divided by


def overhead(datasets: Sequence[FigureData]) -> Figure | None:
    """Time of a step by its parts, for each method and model; the device is synchronised after each part."""
    bars: list[tuple[str, dict[str, float]]] = []
    for data in datasets:
        for row in data.overall:
            if phases := phase_ms(row["pool"].rows):
                bars.append((f"{row['model']}: {row['name']}" if len(datasets) > 1 else row["name"], phases))
    if not bars:
        return None
    figure, (axes,) = panels(height=0.8 + 0.3 * len(bars))
    left = [0.0] * len(bars)
    at = list(range(len(bars)))[::-1]
    for i, phase in enumerate(phase for phase in PHASES if any(phase in phases for _, phases in bars)):
        values = [phases.get(phase, 0.0) for _, phases in bars]
        axes.barh(at, values, 0.7, left=left, color=colour(i + 1), label=PHASE_NAMES.get(phase, phase))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(at, [name for name, _ in bars])
    sideways(axes)
    return finish(figure, axes, _what(datasets), x="step time (ms)")


def phase_ms(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return mean milliseconds of a step by phase; empty where the run did not time them."""
    choices = [choice for row in rows for choice in row["choices"]]
    turns = [turn for c in choices for turn in zip(c.get("phase_time") or [], c.get("forwards") or [], strict=False)]
    timed = [(seconds, forwards) for seconds, forwards in turns if seconds]
    steps = sum(max(forwards - 1, 0) for _, forwards in timed)
    totals: Counter[str] = Counter()
    for seconds, _ in timed:
        totals.update(seconds)
    return {phase: 1e3 * value / steps for phase, value in totals.items() if phase != "prefill"} if steps else {}


def _what(datasets: Sequence[FigureData]) -> str:
    """Name the models and machines of all datasets, each once."""
    return "; ".join(dict.fromkeys(data.measured.split(";")[0] for data in datasets))


def novelty(datasets: Sequence[FigureData]) -> Figure | None:
    """MAT of each question against how much its answer repeats: the share of its 3-grams that occurred earlier, in the
    prompt or in the answer."""
    drawn: list[tuple[dict[str, Any], list[tuple[float, float]]]] = []
    for row in (row for data in datasets for row in data.shown(MOST)):
        answers = [(repetition(answer), accept_lengths(answer)) for answer in row["pool"].first_answers]
        if points := [(100 * share, sum(n) / len(n)) for share, n in answers if n and share == share]:
            drawn.append((row, points))
    benches = list(dict.fromkeys(row["bench"] for row, _ in drawn))
    if sum(len(points) for _, points in drawn) < 8 or len(drawn) > MOST:
        return None
    figure, (axes,) = panels(height=2.2)
    for row, points in drawn:
        (method, variant), j = row["look"], benches.index(row["bench"])
        look = mark((method, variant + j), "cold" if j else None) | {"linestyle": "none", "markersize": 3}
        name = f"{row['name']}, {row['bench']}" if len(benches) > 1 else row["name"]
        axes.plot(*zip(*points, strict=True), **look, alpha=0.55, label=name)
    axes.axhline(1.0, color="#444444", linewidth=0.7)
    share = "% of the answer's 3-grams that occurred earlier"
    note = _what(datasets) + counted(len(drawn), sum(len(data.overall) for data in datasets))
    return finish(figure, axes, note, x=share, y="MAT of the question")


def budget(data: FigureData) -> Figure | None:
    """MAT, MAT over that of recycling with the same start, and speedup over vanilla, by the most nodes of a draft."""
    named = data.lines("budget", (*TREE[1:], *BUDGETS))  # a line's trees are of one kind
    named = {name: rows for name, rows in named.items() if rows[0]["tree"] != "shape"}
    lines = {name: {row["budget"]: row for row in rows} for name, rows in named.items()}
    starts = {name: rows[0]["start"] for name, rows in named.items()}
    references = {starts[name]: line for name, line in reversed(lines.items()) if name.startswith(REFERENCE)}
    if not references or len(lines) < 2:
        return None
    lines = {name: lines[name] for name in largest(named)}
    looks = data.looks(named)
    timed = any(row["speedup_vanilla"] == row["speedup_vanilla"] for line in lines.values() for row in line.values())
    figure, drawn = panels(2 + timed, height=1.2 + 1.0 * (2 + timed), sharex=True)
    mats, gains = drawn[:2]
    columns = list(zip((mats, *drawn[2:]), ("mat", "speedup_vanilla"), strict=False))
    for name, line in lines.items():
        options = mark(looks[name], starts[name]) | {"label": name}
        at = sorted(line)
        for axes, column in columns:
            axes.plot(at, [line[n][column] for n in at], **options)
            band(axes, at, [(line[n][f"{column}_low"], line[n][f"{column}_high"]) for n in at], options["color"])
        reference = references.get(starts[name]) or references.get("hot") or next(iter(references.values()))
        both = [n for n in at if n in reference]
        ratios = [mat_ratio(line[n]["pool"].cells, reference[n]["pool"].cells) for n in both]
        gains.plot(both, [value for value, _, _ in ratios], **options)
        band(gains, both, [(low, high) for _, low, high in ratios], options["color"])
    mats.set_ylabel("MAT\n(tokens per step)")
    gains.set_ylabel(f"MAT over\n{REFERENCE}'s")
    for axes in drawn[2:]:
        axes.set_ylabel("speedup\nover vanilla")
        axes.axhline(1.0, color="#777777", linewidth=0.7)
    drawn[-1].set_xlabel("nodes that a step drafts at most, root not counted")
    note = data.note([row for line in lines.values() for row in line.values()])
    return finish(figure, mats, f"recycling is that of the same start, on the same questions; {note}")
