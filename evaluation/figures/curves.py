"""Curves over a setting: the number of nodes, the number of candidates; and the map of tree shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..statistics.acceptance import LEARNT
from ..statistics.auto_tree import auto_runs, told_by
from .block import TREE, Block, speed_of
from .style import INTERVAL, colour, footnote, legend, mark, marker, panels


def tree_size(block: Block) -> Figure | None:
    """MAT, time of a step and speed over the number of drafted nodes; the star marks the fastest tree."""
    return _curves(block, "tree_nodes", "nodes in the draft tree, root not counted", TREE[2:], star=True)


def topk(block: Block) -> Figure | None:
    """MAT, speed and the matrix's memory over k, the candidates kept per token."""
    return _curves(block, "k", "candidates kept per token, k", TREE[1:], memory=True)


def temperature(block: Block) -> Figure | None:
    """MAT and speed over the temperature."""
    return _curves(block, "temperature", "temperature (0: greedy)", ())


def _curves(
    block: Block, setting: str, label: str, follow: tuple[str, ...], *, star: bool = False, memory: bool = False
) -> Figure | None:
    lines = block.lines(setting, follow)
    if setting == "tree_nodes":  # shapes differ in more than their size: they have a map of their own
        lines = {name: line for name, line in lines.items() if line[0]["tree"] != "shape"}
    if not lines:
        return None
    rows = [row for line in lines.values() for row in line]
    speed, speed_label = speed_of(rows)
    columns = ["mat", *([] if memory else ["step_ms"]), speed]
    columns = [column for column in columns if any(row[column] == row[column] for row in rows)]  # not all is timed
    columns += ["state_mib"] if memory else []
    figure, axes = panels(len(columns), height=0.6 + 1.2 * len(columns), sharex=True)
    for i, (name, line) in enumerate(lines.items()):
        for panel, column in zip(axes, columns, strict=True):
            _line(panel, line, setting, column, i + 2, name)
        fastest = max(line, key=lambda row: float(np.nan_to_num(row[speed], nan=-1.0)))
        if star and speed in columns:
            at = columns.index(speed)
            axes[at].plot(fastest[setting], fastest[speed], "*", color=colour(i + 2), markersize=9, zorder=5)
            axes[at].annotate(
                f"{fastest[setting]:.0f}",
                (fastest[setting], fastest[speed]),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
            )
    titles = {"mat": "MAT\n(tokens a step)", "step_ms": "a step (ms)", "state_mib": "state (MiB)"}
    titles[speed] = speed_label.replace(" ", "\n", 1)
    for panel, column in zip(axes, columns, strict=True):
        panel.set_ylabel(titles[column])
        if column.startswith("speedup"):
            panel.axhline(1.0, color="#444444", linewidth=0.7)
        if setting == "k":
            panel.set_xscale("log", base=2)
    if setting == "k":
        values = sorted({int(row[setting]) for row in rows})
        axes[-1].set_xticks(values, [str(v) for v in values])
    axes[-1].set_xlabel(label)
    legend(figure, axes[0])
    footnote(figure, f"shaded: {INTERVAL}; {block.measured}")
    return figure


def _line(axes: Axes, line: list[dict[str, Any]], setting: str, column: str, i: int, name: str) -> None:
    """One line with its interval as a band."""
    x = [float(row[setting]) for row in line]
    if column == "state_mib":
        axes.plot(x, [row["state_bytes"] / 2**20 for row in line], label=name, **mark(i))
        return
    axes.plot(x, [row[column] for row in line], label=name, **mark(i))
    if f"{column}_low" in line[0]:
        low, high = ([row[f"{column}_{end}"] for row in line] for end in ("low", "high"))
        axes.fill_between(x, low, high, color=colour(i), alpha=0.18, linewidth=0)


def tree_shape(block: Block) -> Figure | None:
    """MAT over depth and breadth of the draft tree; small numbers are the nodes of trees that hold fewer."""
    rows = [row for row in block.drafting if row["tree"] == "shape"]
    deep = sorted({int(row["tree_depth"]) for row in rows})
    wide = sorted({int(row["tree_breadth"]) for row in rows})
    if len(deep) < 2 or len(wide) < 2:
        return None
    most = max(int(row["tree_nodes"]) for row in rows)
    cells = np.full((len(wide), len(deep)), np.nan)
    nodes = np.zeros_like(cells, dtype=int)
    for row in sorted(rows, key=lambda row: float(row["mat"])):  # of several starts the one that accepts most
        at = wide.index(int(row["tree_breadth"])), deep.index(int(row["tree_depth"]))
        cells[at], nodes[at] = row["mat"], row["tree_nodes"]
    figure, (axes,) = panels(height=1.0 + 0.36 * len(wide))
    image = axes.imshow(cells, cmap="cividis", origin="lower", aspect="auto")
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for (y, x), value in np.ndenumerate(cells):
        if value == value:
            ink = "#ffffff" if value < middle else "#000000"
            axes.text(x, y, f"{value:.2f}", ha="center", va="bottom" if nodes[y, x] < most else "center",
                      fontsize=6.5, color=ink)  # fmt: skip
            if nodes[y, x] < most:
                axes.text(x, y, f"{nodes[y, x]}", ha="center", va="top", fontsize=5, color=ink)
    axes.set_xticks(range(len(deep)), [str(d) for d in deep])
    axes.set_yticks(range(len(wide)), [str(w) for w in wide])
    axes.grid(visible=False)
    axes.set_xlabel("depth of the draft tree")
    axes.set_ylabel("breadth (root)")
    figure.colorbar(image, ax=axes, label="MAT", fraction=0.05)
    footnote(figure, f"{most} nodes, or as many as fit (small numbers); {block.measured}")
    return figure


def tree_family(block: Block) -> Figure | None:
    """MAT over the number of nodes by family of trees: balanced against imbalanced."""
    rows = [
        row for row in block.varied("tree", TREE) if row["tree"] not in LEARNT
    ]  # their size changes: see machine_tree
    families = list(dict.fromkeys(row["tree"] for row in rows))
    if len(families) < 2:
        return None
    figure, (axes,) = panels(height=2.1)
    for i, family in enumerate(families):
        own = [row for row in rows if row["tree"] == family]
        axes.plot(
            [row["tree_nodes"] for row in own],
            [row["mat"] for row in own],
            marker(i + 2),
            color=colour(i + 2),
            label=family,
            markersize=8 if len(own) == 1 else 4,
            markerfacecolor="none" if len(own) > 1 else colour(i + 2),
        )
    axes.margins(0.08)  # a large mark on the edge is not cut
    axes.set_xlabel("nodes in the draft tree, root not counted")
    axes.set_ylabel("MAT (tokens a step)")
    legend(figure, axes)
    footnote(figure, block.measured)
    return figure


def machine_tree(block: Block) -> Figure | None:
    """What tree=auto and online measured and promised: step time and speed by size, and the last choices (dots)."""
    known = [(pool, found) for pool in block.pools if (found := told_by(pool.first)) is not None]
    if not known:
        return None
    figure, (time, speed) = panels(2, height=3.0, sharex=True)
    for i, (pool, found) in enumerate(known):
        sizes: list[int] = found["sizes"]
        options = mark(i + 2) | {"label": pool.name}
        time.plot(sizes, [1e3 * seconds for seconds in found["step_seconds"]], **options)
        speed.plot(sizes, found["predicted_speedup_by_size"], **options)
        for own in (run for run in auto_runs(block.pools) if run.pool is pool):
            told, at = own.told, own.told["sizes"].index(own.told["chosen"])
            speed.plot(told["sizes"][at], told["predicted_speedup_by_size"][at], "o", color="#000000", markersize=5)
            if own.achieved == own.achieved:
                speed.axhline(own.achieved, color=colour(i + 2), linewidth=0.9, linestyle=":")
    time.set_ylabel("a step (ms)")
    speed.set_ylabel("decoding speed\nover vanilla")
    speed.set_xlabel("nodes in the draft tree, root not counted")
    for axes in (time, speed):
        axes.margins(y=0.1)  # room for the dot
        axes.set_ylim(bottom=0)
    legend(figure, time)
    footnote(figure, f"dot: a run's last choice, or its most frequent one; dotted: what it achieved; {block.measured}")
    return figure
