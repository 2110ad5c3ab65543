"""Methods next to one another, by subtask and by depth in the draft."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..statistics.acceptance import by_depth
from ..statistics.metrics import OVERALL
from ..statistics.pools import BASELINES
from .figure_data import MOST, FigureData, largest
from .style import INTERVAL, drawable, finish, panels

# as axes print them
CATEGORIES = {"mt_bench": "MT-bench", "qa": "QA", "rag": "RAG", "math_reasoning": "math"}
DEEPEST = 12  # depths beyond this are left out


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
    """Draw one line a subtask, one mark a method, so that many methods fit a column."""
    rows = [row for (row,) in largest([[row] for row in data.shown() if pd.notna(row[column])])]
    if not rows or all(row["method"] == rows[0]["method"] in BASELINES for row in rows):
        return None  # a baseline alone

    categories = list(dict.fromkeys(data.table["category"]))
    names = [drawable(str(category)) for category in categories]
    words = [CATEGORIES.get(name, name.replace("_", " ")) for name in names]
    by_method = dict(iter(data.table.set_index("category").groupby(["method", "variant"])))
    figure, (axes,) = panels(label, "", height=0.8 + 0.27 * len(categories))
    places = np.arange(len(categories))[::-1]
    middle = (len(rows) - 1) / 2
    has_intervals = False
    for number, row in enumerate(rows):
        part = by_method[row["method"], row["variant"]].reindex(categories)
        low = part[f"{column}_low"]
        high = part[f"{column}_high"]
        at = places + (middle - number) / (2 * len(rows))
        axes.hlines(at, low, high, color=row["look"]["color"], linewidth=0.8, alpha=0.8)
        axes.plot(part[column], at, **row["look"] | {"linestyle": "none"})
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
        points = pd.DataFrame(depths[:DEEPEST])
        for panel, share in zip(axes, ("joint", "conditional"), strict=True):
            panel.plot(points["depth"], 100 * points[share], **row["look"])

    for panel in axes:
        panel.set_ylim(bottom=0)
    axes[-1].set_xticks(range(1, min(deepest, DEEPEST) + 1))
    return finish(figure, data.note([row for row, _ in rows]))
