"""Figures over one setting that is a number, and the map of tree shapes."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from .figure_data import TREE, FigureData, largest, speed_of
from .style import band, finish, grid, mark, panels


def tree_size(data: FigureData) -> Figure | None:
    """MAT, step time and speed by the number of drafted nodes; the star marks the fastest tree."""
    return _curves(data, "tree_nodes", "nodes in the draft tree, root not counted", TREE[2:], star=True)


def topk(data: FigureData) -> Figure | None:
    """MAT, speed and the matrix's memory by k, the number of candidates kept per token."""
    return _curves(data, "k", "candidates kept per token, k", TREE[1:], memory=True)


def temperature(data: FigureData) -> Figure | None:
    """MAT and speed by temperature."""
    return _curves(data, "temperature", "temperature (0: greedy)", ())


def _curves(
    data: FigureData, setting: str, label: str, follow: tuple[str, ...], *, star: bool = False, memory: bool = False
) -> Figure | None:
    """Draw a panel each of MAT, step time (or memory) and speed, a line each configuration; bands are intervals."""
    lines = data.lines(setting, follow)
    if setting == "tree_nodes":  # shapes differ in more than their size: they have a map of their own
        lines = {name: line for name, line in lines.items() if line[0]["tree"] != "shape"}
    if not (lines := largest(lines)):
        return None
    looks = data.looks(lines)
    rows = [row for line in lines.values() for row in line]
    speed, speed_label = speed_of(rows)
    titles = {"mat": "MAT\n(tokens per step)"} | ({} if memory else {"step_ms": "step time (ms)"})
    titles |= {speed: speed_label.replace(" ", "\n", 1)} | ({"state_mib": "state (MiB)"} if memory else {})
    titles = {column: title for column, title in titles.items() if any(row[column] == row[column] for row in rows)}
    figure, axes = panels(len(titles), height=0.6 + 1.2 * len(titles), sharex=True)
    for panel, (column, title) in zip(axes, titles.items(), strict=True):
        for name, line in lines.items():
            x, look = [float(row[setting]) for row in line], mark(looks[name], line[0]["start"])
            panel.plot(x, [row[column] for row in line], label=name, **look)
            if f"{column}_low" in line[0]:
                band(panel, x, [(row[f"{column}_low"], row[f"{column}_high"]) for row in line], look["color"])
            if star and column == speed:
                best = max(line, key=lambda row: float(np.nan_to_num(row[speed], nan=-1.0)))
                at = best[setting], best[speed]
                panel.plot(*at, "*", color=look["color"], markersize=9, zorder=5)
                panel.annotate(f"{at[0]:.0f}", at, xytext=(0, 5), textcoords="offset points", ha="center", fontsize=6.5)
        panel.set_ylabel(title)
        if column.startswith("speedup"):
            panel.axhline(1.0, color="#444444", linewidth=0.7)
    if setting == "k":
        values = sorted({int(row[setting]) for row in rows})
        axes[-1].set_xscale("log", base=2)  # of all panels, which share it
        axes[-1].set_xticks(values, [str(v) for v in values])
    axes[-1].set_xlabel(label)
    return finish(figure, axes[0], data.note(rows))


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
    names = list(map(str, wide)), list(map(str, deep))
    return grid(*names, mats.tolist(), "MAT", note, words=fewer, x="depth of the draft tree", y="breadth (root)")
