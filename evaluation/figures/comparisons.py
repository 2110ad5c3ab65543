"""Methods next to one another.

By subtask, depth in the draft, part of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..statistics.acceptance import by_depth
from ..statistics.metrics import OVERALL, choices
from ..statistics.pools import BASELINES
from .figure_data import MOST, FigureData, Row
from .style import INTERVAL, PALETTE, drawable, finish, grid, panels

# as axes print them
CATEGORIES = {"mt_bench": "MT-bench", "qa": "QA", "rag": "RAG", "math_reasoning": "math"}
DEEPEST = 12  # depths beyond this are left out
PARTS = {
    "draft": "draft",
    "forward": "forward",
    "verify": "verify",
    "commit": "commit",
    "observe": "update",
    "loop": "loop",
    "step": "whole step",
}


def mat(data: FigureData) -> Figure | None:
    """Tokens per step (MAT) by subtask and method."""
    return _by_category(data, "mat", "MAT (tokens per step)")


def speedup_over_hf(data: FigureData) -> Figure | None:
    """Speedup over transformers' own generate, by subtask and method."""
    return _by_category(data, "speedup_hf", "speedup over hf")


def speedup_over_vanilla(data: FigureData) -> Figure | None:
    """Speedup over this engine without drafts, by subtask and method."""
    return _by_category(data, "speedup_vanilla", "speedup over vanilla")


def _by_category(data: FigureData, column: str, label: str) -> Figure | None:
    """Draw one line a subtask, one mark a method, so that many methods fit a column.

    Bars are 95 % intervals.
    """
    rows = [row for row in data.shown() if pd.notna(row[column])]
    if not rows or all(row["method"] == rows[0]["method"] in BASELINES for row in rows):
        return None  # a baseline alone

    categories = list(dict.fromkeys(data.table["category"]))
    names = [drawable(str(category)) for category in categories]
    words = [CATEGORIES.get(name, name.replace("_", " ")) for name in names]
    by_method = dict(iter(data.table.set_index("category").groupby(["method", "variant"])))
    values = []
    for row in rows:
        part = by_method[row["method"], row["variant"]]
        values.append(part.reindex(categories))

    if len(rows) > MOST:
        cells = pd.DataFrame(
            [part[column].tolist() for part in values],
            index=[row["name"] for row in rows],
            columns=words,
        )
        middle = 1.0 if column.startswith("speedup") else None
        return grid(cells, label, data.note(rows), middle=middle)

    figure, (axes,) = panels(
        label,
        "",
        height=0.8 + 0.27 * len(categories),
    )
    places = np.arange(len(categories))[::-1]
    middle = (len(rows) - 1) / 2
    offsets = (middle - np.arange(len(rows))) / (2 * len(rows))
    has_intervals = False
    for row, part, offset in zip(rows, values, offsets, strict=True):
        low = part[f"{column}_low"]
        high = part[f"{column}_high"]
        ink = row["look"]["color"]
        axes.hlines(
            places + offset,
            low,
            high,
            color=ink,
            linewidth=0.8,
            alpha=0.8,
        )
        axes.plot(
            part[column],
            places + offset,
            **row["look"] | {"linestyle": "none"},
        )
        has_intervals |= bool((low < high).any())

    axes.axvline(1.0, color="#444444", linewidth=0.7)
    axes.set_yticks(places, words)
    if OVERALL in categories:
        axes.axhline(0.5, color="#bbbbbb", linewidth=0.7, linestyle=":")
    note = data.note(rows)
    return finish(figure, f"lines: {INTERVAL}; {note}" if has_intervals else note)


def acceptance_by_depth(data: FigureData) -> Figure | None:
    """Acceptance by depth in the draft: the share of drafting steps whose accepted path reaches a
    depth (joint) and, where drawn, of those that reached the depth above it (conditional)."""
    rows = []
    for row in data.shown(MOST):
        depths = by_depth(row["pool"].accepted)
        if depths:
            rows.append((row, depths))
    if not rows:
        return None

    deepest = max(len(depths) for _, depths in rows)
    label = "depth in the draft tree"
    if deepest > DEEPEST:
        label += f" (deepest: {deepest})"
    titles = ("joint (% of\ndrafting steps)", "conditional (% of\nthe depth above)")
    figure, axes = panels(label, *titles, height=3.1)

    for row, depths in rows:
        drawn = pd.DataFrame(depths[:DEEPEST])
        for panel, share in zip(axes, ("joint", "conditional"), strict=True):
            panel.plot(drawn["depth"], 100 * drawn[share], **row["look"])

    for panel in axes:
        panel.set_ylim(bottom=0)
    axes[-1].set_xticks(range(1, min(deepest, DEEPEST) + 1))
    return finish(figure, data.note(rows))


def overhead(data: FigureData) -> Figure | None:
    """Time of a step by its parts, for each method; the device is synchronised after each part."""
    names = []
    bars = []
    for row in data.overall:
        times = part_ms(row["pool"].rows)
        if times:
            names.append(row["name"])
            bars.append(times)
    if not bars:
        return None

    figure, (axes,) = panels(
        "step time (ms)",
        "",
        height=0.8 + 0.3 * len(bars),
    )
    table = pd.DataFrame(bars, columns=[*PARTS])
    known = table.dropna(axis=1, how="all")
    widths = known.fillna(0.0)
    ends = widths.cumsum(axis=1)
    at = np.arange(len(bars))[::-1]
    for part, colour in zip(map(str, widths), PALETTE[1:], strict=False):
        begins = ends[part] - widths[part]
        axes.barh(
            at,
            widths[part],
            0.7,
            left=begins,
            color=colour,
            label=PARTS[part],
        )

    axes.set_yticks(at, names)
    return finish(figure, data.note(names))


def part_ms(rows: Sequence[Row]) -> dict[str, float]:
    """Return mean milliseconds of a step by its parts; empty where the run did not time them."""
    steps = 0
    seconds = Counter[str]()
    for choice in choices(rows):
        turns = zip(
            choice.get("phase_time") or [],
            choice.get("forwards") or [],
            strict=False,
        )
        for times, forwards in turns:
            if times:
                steps += max(forwards - 1, 0)
                seconds.update(times)

    if not steps:
        return {}
    del seconds["prefill"]
    return {part: 1e3 * value / steps for part, value in seconds.items()}
