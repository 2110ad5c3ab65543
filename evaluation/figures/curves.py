"""Figures over one setting that is a number, and the map of tree shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..statistics.pools import BASELINES, BUDGETS, mat_ratio
from .figure_data import FigureData, Line, Row, largest
from .style import band, finish, grid, panels

REFERENCE = "recycling"  # the method whose MAT the others are divided by
TITLES = {
    "mat": "MAT\n(tokens per step)",
    "gain": f"MAT over\n{REFERENCE}'s",
    "step_ms": "step time (ms)",
    "state_mib": "state (MiB)",
    "tokens_per_second": "tokens/s",
    **{f"speedup_{name}": f"speedup\nover {name}" for name in BASELINES},
}


def tree_size(data: FigureData) -> Figure | None:
    """MAT, step time and speed by the number of drafted nodes; the star marks the fastest tree."""
    lines, label = data.lines("tree_nodes", "tree_depth", "tree_breadth"), "nodes in the draft tree, root not counted"
    return _curves(data, lines, "tree_nodes", label, ("mat", "step_ms", "speed"))


def topk(data: FigureData) -> Figure | None:
    """MAT, speed and the matrix's memory by k, the number of candidates kept per token."""
    lines, label = data.lines("k", "tree_nodes", "tree_depth", "tree_breadth"), "candidates kept per token, k"
    figure = _curves(data, lines, "k", label, ("mat", "speed", "state_mib"))
    if figure:
        values = sorted({int(row["k"]) for line in lines for row in line})
        figure.axes[-1].set_xscale("log", base=2)  # of all panels, which share it
        figure.axes[-1].set_xticks(values, [str(value) for value in values])
    return figure


def temperature(data: FigureData) -> Figure | None:
    """MAT and speed by temperature."""
    lines = data.lines("temperature")
    return _curves(data, lines, "temperature", "temperature (0: greedy)", ("mat", "step_ms", "speed"))


def budget(data: FigureData) -> Figure | None:
    """MAT, MAT over that of recycling with the same start, and speedup over vanilla, by the most nodes of a draft."""
    lines = data.lines("budget", "tree_nodes", "tree_depth", "tree_breadth", *BUDGETS)
    of_reference = [line for line in reversed(lines) if line[0]["pool"].method == REFERENCE]
    references = {line[0]["start"]: {row["budget"]: row["pool"].cells for row in line} for line in of_reference}
    if not references or len(lines) < 2:
        return None
    lines = largest(lines)
    for line in lines:
        cells = references.get(line[0]["start"]) or references.get("hot") or next(iter(references.values()))
        for row in line:
            known = row["budget"] in cells
            ratio = mat_ratio(row["pool"].cells, cells[row["budget"]]) if known else (math.nan,) * 3
            row |= dict(zip(("gain", "gain_low", "gain_high"), ratio, strict=True))
    label, note = (
        "nodes that a step drafts at most, root not counted",
        "recycling is that of the same start, on the same ",
    )
    return _curves(data, lines, "budget", label, ("mat", "gain", "speed"), note + "questions; ")


def _curves(
    data: FigureData, lines: Sequence[Line], setting: str, label: str, columns: Sequence[str], note: str = ""
) -> Figure | None:
    """Draw a panel for each column that has values, a line each configuration; bands are intervals.

    The column `speed` is the speedup over vanilla, else over hf, else tokens a second.
    """
    lines = largest(lines)
    rows = [row for line in lines for row in line]
    if not rows:
        return None

    def known(column: str) -> bool:
        return any(row[column] == row[column] for row in rows)

    speed = next(filter(known, (f"speedup_{name}" for name in reversed(BASELINES))), "tokens_per_second")
    shown = [*filter(known, (speed if column == "speed" else column for column in columns))]
    figure, axes = panels(label, *(TITLES[column] for column in shown), height=0.6 + 1.2 * len(shown))
    for panel, column in zip(axes, shown, strict=True):
        for line in lines:
            line, look = [row for row in line if row[column] == row[column]], line[0]["look"]
            x = [float(row[setting]) for row in line]
            panel.plot(x, [row[column] for row in line], **look)
            if f"{column}_low" in rows[0]:
                band(panel, x, [(row[f"{column}_low"], row[f"{column}_high"]) for row in line], look["color"])
            if line and setting == "tree_nodes" and column == speed:
                _star(panel, max(line, key=lambda row: float(row[speed])), speed)
        if column.startswith("speedup"):
            panel.axhline(1.0, color="#777777", linewidth=0.7)
    return finish(figure, note + data.note(rows))


def _star(panel: Axes, row: Row, speed: str) -> None:
    """Mark the row of the best tree size with its number."""
    at = row["tree_nodes"], row[speed]
    panel.plot(*at, "*", color=row["look"]["color"], markersize=9, zorder=5)
    panel.annotate(f"{at[0]:.0f}", at, xytext=(0, 5), textcoords="offset points", ha="center", fontsize=6.5)


def tree_shape(data: FigureData) -> Figure | None:
    """MAT by depth and breadth of the draft tree; in brackets the nodes of trees that hold fewer."""
    rows = [row for row in data.drafting if row["tree"] == "shape"]
    deep, wide = (sorted({int(row[column]) for row in rows}) for column in ("tree_depth", "tree_breadth"))
    if len(deep) < 2 or len(wide) < 2:
        return None
    wide.reverse()
    most = max(int(row["tree_nodes"]) for row in rows)
    mats = np.full((len(wide), len(deep)), np.nan)
    fewer: dict[tuple[int, int], str] = {}
    for row in sorted(rows, key=lambda row: float(row["mat"])):  # of several starts the largest MAT
        at = wide.index(int(row["tree_breadth"])), deep.index(int(row["tree_depth"]))
        mats[at], fewer[at] = row["mat"], f"({int(row['tree_nodes'])})" if row["tree_nodes"] < most else ""
    note = f"{most} nodes, or as many as fit (in brackets); {data.note(fewer)}"
    names, labels = (list(map(str, wide)), list(map(str, deep))), ("depth of the draft tree", "breadth (root)")
    return grid(*names, mats.tolist(), "MAT", note, words=fewer, xlabel=labels[0], ylabel=labels[1])
