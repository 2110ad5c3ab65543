"""Figures over one setting that is a number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..statistics.pools import BASELINES, BUDGETS, REFERENCE, Cells, mat_ratio
from .figure_data import FigureData, Line, largest
from .style import INTERVAL, finish, panels

SHAPE = ["tree_depth", "tree_breadth"]
DOUBLED = ("k", "batch")  # settings that go up by factors of two
# titles of the x axis
SETTINGS = {
    "tree_nodes": "nodes in the draft tree, root not counted",
    "k": "candidates kept per token, k",
    "temperature": "temperature (0: greedy)",
    "batch": "sequences in a batch",
    "budget": "most draft nodes of a step, root not counted",
}
# titles of the panels
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
    """MAT, step time and speed by the number of drafted nodes."""
    lines = data.lines("tree_nodes", *SHAPE)
    return _curves(data, lines, "tree_nodes", ("mat", "step_ms", "speed"))


def topk(data: FigureData) -> Figure | None:
    """MAT, speed and the matrix's memory by k, the number of candidates kept per token."""
    lines = data.lines("k", "tree_nodes", *SHAPE)
    return _curves(data, lines, "k", ("mat", "speed", "state_mib"))


def temperature(data: FigureData) -> Figure | None:
    """MAT and speed by temperature."""
    lines = data.lines("temperature")
    return _curves(data, lines, "temperature", ("mat", "step_ms", "speed"))


def novelty(data: FigureData) -> Figure | None:
    """MAT where much or little repeats, at equal nodes where a method has them. A token is novel if
    it and the three before it occur nowhere earlier, together, in prompt and answer. Turns are in
    four groups of equal size by their share of novel tokens.
    """
    best = [row for row in data.at_equal_nodes() if row["pool"].novelty]
    if not best:
        return None
    shares = np.array(best[0]["pool"].novelty)
    bounds = [*itertools.pairwise((0.0, *np.quantile(shares, (0.25, 0.5, 0.75)), math.inf))]
    groups = [shares[(low <= shares) & (shares < high)] for low, high in bounds]
    if not all(map(len, groups)):
        return None

    figure, (axes,) = panels(
        "novel tokens, % (mean of a quarter of the turns)", "MAT (log scale)", height=2.6
    )
    means = [100 * group.mean() for group in groups]
    for row in best:
        parts = [row["pool"].of_part(novel=quarter) for quarter in bounds]
        _draw_line(axes, pd.DataFrame(parts).assign(novelty=means), "novelty", "mat", row["look"])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    return finish(figure, f"shaded: {INTERVAL}; {data.note(best)}")


def batch(data: FigureData) -> Figure | None:
    """Speed of all sequences together, MAT and rows a forward, by the number of sequences decoded
    together.
    """
    lines = data.lines("batch", baselines=True)
    return _curves(data, lines, "batch", ("tokens_per_second_total", "mat", "rows_per_forward"))


def budget(data: FigureData) -> Figure | None:
    """MAT, MAT over that of recycling with the same start, and speedup over vanilla, by the most
    nodes of a draft.
    """
    lines = data.lines("budget", "tree_nodes", *SHAPE, *BUDGETS)
    references: dict[Any, dict[Any, Cells]] = {}  # by start and budget
    for line in reversed(lines):
        if line[0]["pool"].method == REFERENCE:
            start = line[0]["start"]
            references[start] = {row["budget"]: row["pool"].cells for row in line}
    if not references or len(lines) < 2:
        return None

    lines = largest(lines)
    usual = references.get("hot") or next(iter(references.values()))
    for line in lines:
        cells = references.get(line[0]["start"]) or usual
        for row in line:
            ratio = (math.nan, math.nan, math.nan)
            if row["budget"] in cells:
                ratio = mat_ratio(row["pool"].cells, cells[row["budget"]])
            row["gain"], row["gain_low"], row["gain_high"] = ratio

    note = f"ratios to {REFERENCE}: of the same start (hot or cold) and questions; "
    return _curves(data, lines, "budget", ("mat", "gain", "speed"), note)


def _curves(
    data: FigureData,
    lines: Sequence[Line],
    setting: str,
    columns: Sequence[str],
    note: str = "",
) -> Figure | None:
    """Draw a panel for each column that has values, and in it a line for each of `lines`.

    The column `speed` is the speedup over vanilla, else over hf, else tokens per second.
    """
    if not lines:
        return None

    frames = [pd.DataFrame(line) for line in largest(lines)]
    rows = pd.concat(frames)
    known = rows.columns[rows.notna().any()]
    speed = next((name for name in SPEEDS if name in known), "")
    names = [speed if column == "speed" else column for column in columns]
    names = [name for name in names if name in known]

    titles = TITLES | SPEEDS
    figure, axes = panels(
        SETTINGS[setting],
        *(titles[column] for column in names),
        height=0.6 + 1.2 * len(names),
    )
    for panel, column in zip(axes, names, strict=True):
        for frame in frames:
            line = frame[frame[column].notna()]
            look = frame["look"].iloc[0]
            _draw_line(panel, line, setting, column, look)
        if column.startswith("speedup"):
            panel.axhline(1.0, color="#777777", linewidth=0.7)

    if setting in DOUBLED:
        values = sorted({int(value) for value in rows[setting]})
        axes[-1].set_xscale("log", base=2)  # for all panels, which share the x axis
        axes[-1].set_xticks(values, [str(value) for value in values])
    if any(panel.collections for panel in axes):
        note = f"shaded: {INTERVAL}; {note}"
    return finish(figure, note + data.note(rows.to_dict("records")))


def _draw_line(
    panel: Axes, line: pd.DataFrame, setting: str, column: str, look: dict[str, Any]
) -> None:
    panel.plot(line[setting], line[column], **look)
    if f"{column}_low" not in line:
        return

    low = line[f"{column}_low"]
    high = line[f"{column}_high"]
    if (low < high).any():
        panel.fill_between(
            line[setting],
            low,
            high,
            color=look["color"],
            alpha=0.1,
            linewidth=0,
        )
