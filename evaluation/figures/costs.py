"""What drafting costs and when it pays: memory, the parts of a step, repetition of the text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from ..records.rows import accept_lengths
from ..statistics.published import read_published
from ..statistics.tables import BASELINES
from .block import MOST, Block, speed_of
from .style import colour, footnote, legend, marker, panels

PHASES = ("draft", "forward", "verify", "commit", "observe", "loop", "step")
PHASE_NAMES = {"observe": "update", "step": "whole step"}


def memory(block: Block) -> Figure | None:
    """Speedup against what a method keeps in memory beside the model; published figures for Vicuna-7B hollow."""
    rows = [row for row in block.drafting if row["state_bytes"] == row["state_bytes"] and row["state_bytes"] > 0]
    sizes = {(row["pool"].method, row["state_bytes"]) for row in rows}
    if max((sum(m == method for m, _ in sizes) for method, _ in sizes), default=0) < 3:  # of one method
        return None
    column, speed_label = speed_of(rows)
    if all(row[column] != row[column] for row in rows):
        return None
    figure, (axes,) = panels(height=2.1)
    for i, label in enumerate(dict.fromkeys(row["method"] for row in rows)):
        own = [row for row in rows if row["method"] == label]
        x = [row["state_bytes"] / 2**20 for row in own]
        axes.plot(x, [row[column] for row in own], marker(i + 2), color=colour(i + 2), label=label)
    if column != "tokens_per_second":
        for i, row in enumerate(read_published("memory")):
            axes.plot(row["memory_mb"], row["speedup"], marker(i), color="#777777", markerfacecolor="none",
                      label=f"{row['method']}, published")  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("state beside the model (MiB; published: MB)")
    axes.set_ylabel(speed_label)
    legend(figure, axes)
    footnote(figure, block.measured)
    return figure


def overhead(blocks: Sequence[Block]) -> Figure | None:
    """Where a step's time goes, by method and model: the device is waited for after each part."""
    bars: list[tuple[str, dict[str, float]]] = []
    several = len(blocks) > 1
    for block in blocks:
        for row in block.overall:
            parts = phase_ms(row["pool"].rows)
            if parts:
                model = f"{row['model']}: " if several else ""
                bars.append((f"{model}{row['name']}", parts))
    if not bars:
        return None
    present = [phase for phase in PHASES if any(phase in parts for _, parts in bars)]
    figure, (axes,) = panels(height=0.8 + 0.3 * len(bars))
    left = [0.0] * len(bars)
    at = list(range(len(bars)))[::-1]
    for i, phase in enumerate(present):
        values = [parts.get(phase, 0.0) for _, parts in bars]
        axes.barh(at, values, 0.7, left=left, color=colour(i + 1), label=PHASE_NAMES.get(phase, phase))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(at, [name for name, _ in bars])
    axes.grid(axis="x")
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("a step (ms)")
    legend(figure, axes)
    footnote(figure, _what(blocks))
    return figure


def phase_ms(rows: Sequence[dict[str, object]]) -> dict[str, float]:
    """Mean milliseconds of a step by phase; empty where the run did not time them."""
    seconds: dict[str, float] = {}
    steps = 0
    for row in rows:
        for choice in row["choices"]:  # type: ignore[attr-defined]
            for phases, forwards in zip(choice.get("phase_time") or [], choice.get("forwards") or [], strict=False):
                if phases:
                    steps += max(forwards - 1, 0)
                    for phase, value in phases.items():
                        seconds[phase] = seconds.get(phase, 0.0) + value
    return {phase: 1e3 * value / steps for phase, value in seconds.items() if phase != "prefill"} if steps else {}


def _what(blocks: Sequence[Block]) -> str:
    """The models and machines of all blocks, each once."""
    return "; ".join(dict.fromkeys(block.measured.split(";")[0] for block in blocks))


def novelty(blocks: Sequence[Block]) -> Figure | None:
    """When drafting stops paying: MAT of a question against the share of its answer's 3-grams that stand earlier."""
    points: list[tuple[str, str, float, float]] = []  # method, bench, repetition, MAT
    for block in blocks:
        for row in block.shown():
            if row["method"] in BASELINES:
                continue
            for answer in row["pool"].first_answers:
                lengths = accept_lengths(answer)
                repeated = repetition(answer)
                if lengths and repeated == repeated:
                    points.append((row["name"], row["bench"], repeated, sum(lengths) / len(lengths)))
    names, benches = (list(dict.fromkeys(p[i] for p in points)) for i in (0, 1))
    if len(points) < 8 or len(names) * len(benches) > MOST:
        return None
    figure, (axes,) = panels(height=2.2)
    for i, name in enumerate(names):
        for j, bench in enumerate(benches):
            own = [p for p in points if p[0] == name and p[1] == bench]
            axes.plot([100 * p[2] for p in own], [p[3] for p in own], marker(j), color=colour(i + 2), alpha=0.55,
                      markersize=3, linestyle="none", markerfacecolor="none" if j else colour(i + 2),
                      label=f"{name}, {bench}" if len(benches) > 1 else name)  # fmt: skip
    axes.axhline(1.0, color="#444444", linewidth=0.7)
    axes.set_xlabel("% of the answer's 3-grams that stand earlier, in the prompt or in it")
    axes.set_ylabel("MAT of the question")
    legend(figure, axes)
    footnote(figure, _what(blocks))
    return figure


def repetition(row: dict[str, object]) -> float:
    """Mean over a question's turns of the share of repeated 3-grams; NaN where the row does not say."""
    turns = [share for choice in row["choices"] for share in choice.get("repeated_3grams") or []]  # type: ignore[attr-defined]
    shares = [share for share in turns if share is not None]
    return sum(shares) / len(shares) if shares else math.nan
