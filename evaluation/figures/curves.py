"""Figures over one setting that is a number, and the map of tree shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..statistics.pools import BASELINES, BUDGETS, mat_ratio
from .figure_data import FigureData, Line, largest
from .style import INTERVAL, finish, grid, panels

SHAPE = ["tree_depth", "tree_breadth"]
REFERENCE = "recycling"  # the method whose MAT the others are divided by
DOUBLED = ("k", "batch")  # settings that go up by factors of two
TITLES = {
    "mat": "MAT\n(tokens per step)",
    "gain": f"MAT over\n{REFERENCE}'s",
    "step_ms": "step time (ms)",
    "state_mib": "state (MiB)",
    "rows_per_forward": "rows a forward",
    "tokens_per_second_total": "tokens/s\nof the batch",
}
# the first known one is drawn
SPEEDS = {f"speedup_{name}": f"speedup\nover {name}" for name in reversed(BASELINES)}
SPEEDS["tokens_per_second"] = "tokens/s"


def tree_size(data: FigureData) -> Figure | None:
    """MAT, step time and speed by the number of drafted nodes; the star marks the fastest tree."""
    lines = data.lines("tree_nodes", *SHAPE)
    label = "nodes in the draft tree, root not counted"
    return _curves(data, lines, "tree_nodes", label, ("mat", "step_ms", "speed"))


def topk(data: FigureData) -> Figure | None:
    """MAT, speed and the matrix's memory by k, the number of candidates kept per token."""
    lines = data.lines("k", "tree_nodes", *SHAPE)
    label = "candidates kept per token, k"
    return _curves(data, lines, "k", label, ("mat", "speed", "state_mib"))


def temperature(data: FigureData) -> Figure | None:
    """MAT and speed by temperature."""
    lines = data.lines("temperature")
    return _curves(
        data, lines, "temperature", "temperature (0: greedy)", ("mat", "step_ms", "speed")
    )


def batch(data: FigureData) -> Figure | None:
    """Speed of all sequences together, MAT and rows a forward, by the number of sequences decoded
    together.
    """
    lines = data.lines("batch", baselines=True)
    columns = ("tokens_per_second_total", "mat", "rows_per_forward")
    return _curves(data, lines, "batch", "sequences in a batch", columns)


def budget(data: FigureData) -> Figure | None:
    """MAT, MAT over that of recycling with the same start, and speedup over vanilla, by the most
    nodes of a draft.
    """
    lines = data.lines("budget", "tree_nodes", *SHAPE, *BUDGETS)
    of_reference = [line for line in reversed(lines) if line[0]["pool"].method == REFERENCE]
    references = {
        line[0]["start"]: {row["budget"]: row["pool"].cells for row in line}
        for line in of_reference
    }
    if not references or len(lines) < 2:
        return None
    lines = largest(lines)
    for line in lines:
        cells = (
            references.get(line[0]["start"])
            or references.get("hot")
            or next(iter(references.values()))
        )
        for row in line:
            known = row["budget"] in cells
            ratio = mat_ratio(row["pool"].cells, cells[row["budget"]]) if known else (math.nan,) * 3
            row |= dict(zip(("gain", "gain_low", "gain_high"), ratio, strict=True))
    note = f"ratios to {REFERENCE}: of the same start (hot or cold) and questions; "
    label = "nodes that a step drafts at most, root not counted"
    return _curves(data, lines, "budget", label, ("mat", "gain", "speed"), note)


def _curves(
    data: FigureData,
    lines: Sequence[Line],
    setting: str,
    label: str,
    columns: Sequence[str],
    note: str = "",
) -> Figure | None:
    """Draw a panel for each column that has values, with a line for each element of `lines`; bands
    are intervals.

    The column `speed` is the speedup over vanilla, else over hf, else tokens per second.
    """
    if not lines:
        return None
    frames = [pd.DataFrame(line) for line in largest(lines)]
    rows = pd.concat(frames)
    known = rows.columns[rows.notna().any()]
    speed = next((name for name in SPEEDS if name in known), "")
    shown = [
        name
        for name in (speed if column == "speed" else column for column in columns)
        if name in known
    ]
    figure, axes = panels(
        label, *((TITLES | SPEEDS)[column] for column in shown), height=0.6 + 1.2 * len(shown)
    )
    shaded = False
    for panel, column in zip(axes, shown, strict=True):
        for frame in frames:
            line = frame[frame[column].notna()]
            look = frame["look"].iloc[0]
            panel.plot(line[setting], line[column], **look)
            if f"{column}_low" in line and (line[f"{column}_low"] < line[f"{column}_high"]).any():
                ends = line[f"{column}_low"], line[f"{column}_high"]
                panel.fill_between(
                    line[setting], *ends, color=look["color"], alpha=0.15, linewidth=0
                )
                shaded = True
            if setting == "tree_nodes" and column == speed and len(line):
                at = tuple(line.sort_values(speed)[[setting, speed]].iloc[-1])
                above: dict[str, Any] = {
                    "xytext": (0, 5),
                    "textcoords": "offset points",
                    "ha": "center",
                }
                panel.plot(*at, "*", color=look["color"], markersize=9, zorder=5)
                panel.annotate(f"{at[0]:.0f}", at, fontsize=6.5, **above)
        if column.startswith("speedup"):
            panel.axhline(1.0, color="#777777", linewidth=0.7)
    if setting in DOUBLED:
        values = sorted({int(value) for value in rows[setting]})
        axes[-1].set_xscale("log", base=2)  # for all panels, which share the x axis
        axes[-1].set_xticks(values, [str(value) for value in values])
    return finish(figure, f"shaded: {INTERVAL}; " * shaded + note + data.note(rows))


def tree_shape(data: FigureData) -> Figure | None:
    """MAT by depth and breadth of the draft tree; in brackets the nodes of trees that hold
    fewer.
    """
    rows = pd.DataFrame(data.drafting or None, columns=["tree", "tree_nodes", *SHAPE, "mat"])
    rows = rows[rows["tree"] == "shape"].sort_values("mat").astype(dict.fromkeys(SHAPE, int))
    rows = rows.drop_duplicates(SHAPE, keep="last")  # keep the start with the largest MAT
    mats, nodes = (
        rows.pivot(index=SHAPE[1], columns=SHAPE[0], values=of)[::-1]
        for of in ("mat", "tree_nodes")
    )
    if min(mats.shape) < 2:
        return None
    most = int(rows["tree_nodes"].max())
    fewer = {at: f"({count:.0f})" for at, count in np.ndenumerate(nodes.to_numpy()) if count < most}
    note = f"{most} nodes, or as many as fit (in brackets); {data.note(rows)}"
    return grid(
        mats, "MAT", note, words=fewer, xlabel="depth of the draft tree", ylabel="breadth (root)"
    )
