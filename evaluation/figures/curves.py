"""Figures over one setting: curves where it is a number, bars where it is a choice, and the map of tree shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..statistics.acceptance import LEARNT
from ..statistics.published import read_published
from ..statistics.trees import auto_figures, auto_runs
from .figure_data import TREE, FigureData, speed_of
from .style import INTERVAL, colour, finish, mark, marker, panels, sideways


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
    lines = data.lines(setting, follow)
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
            options: dict[str, Any] = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "fontsize": 6.5}
            axes[at].annotate(f"{fastest[setting]:.0f}", (fastest[setting], fastest[speed]), **options)
    titles = {"mat": "MAT\n(tokens per step)", "step_ms": "step time (ms)", "state_mib": "state (MiB)"}
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
    return finish(figure, axes[0], f"shaded: {INTERVAL}; {data.measured}")


def _line(axes: Axes, line: list[dict[str, Any]], setting: str, column: str, i: int, name: str) -> None:
    """Draw one line with its interval as a band."""
    x = [float(row[setting]) for row in line]
    values = [row["state_bytes"] / 2**20 if column == "state_mib" else row[column] for row in line]
    axes.plot(x, values, label=name, **mark(i))
    if f"{column}_low" in line[0]:
        low, high = ([row[f"{column}_{end}"] for row in line] for end in ("low", "high"))
        axes.fill_between(x, low, high, color=colour(i), alpha=0.18, linewidth=0)


def tree_shape(data: FigureData) -> Figure | None:
    """MAT by depth and breadth of the draft tree; small numbers give the nodes of trees that hold fewer."""
    rows = [row for row in data.drafting if row["tree"] == "shape"]
    deep = sorted({int(row["tree_depth"]) for row in rows})
    wide = sorted({int(row["tree_breadth"]) for row in rows})
    if len(deep) < 2 or len(wide) < 2:
        return None
    most = max(int(row["tree_nodes"]) for row in rows)
    cells = np.full((len(wide), len(deep)), np.nan)
    nodes = np.zeros_like(cells, dtype=int)
    for row in sorted(rows, key=lambda row: float(row["mat"])):  # of several starts the largest MAT
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
    figure.colorbar(image, ax=axes, label="MAT", fraction=0.05)
    note = f"{most} nodes, or as many as fit (small numbers); {data.measured}"
    return finish(figure, axes, note, x="depth of the draft tree", y="breadth (root)")


def tree_family(data: FigureData) -> Figure | None:
    """MAT by number of nodes, for each family of trees."""
    rows = [row for row in data.varied("tree", TREE) if row["tree"] != LEARNT]  # their size changes: see machine_tree
    families = list(dict.fromkeys(row["tree"] for row in rows))
    if len(families) < 2:
        return None
    figure, (axes,) = panels(height=2.1)
    for i, family in enumerate(families):
        members = [row for row in rows if row["tree"] == family]
        nodes, mats = ([row[column] for row in members] for column in ("tree_nodes", "mat"))
        size, face = (8, colour(i + 2)) if len(members) == 1 else (4, "none")
        options = {"color": colour(i + 2), "label": family, "markersize": size, "markerfacecolor": face}
        axes.plot(nodes, mats, marker(i + 2), **options)
    axes.margins(0.08)  # so that a large mark on the edge is not cut
    return finish(figure, axes, data.measured, x="nodes in the draft tree without the root", y="MAT (tokens per step)")


def machine_tree(data: FigureData) -> Figure | None:
    """Step time and predicted decoding speed by tree size, from which tree=auto chooses; dots mark the
    sizes chosen, dotted lines the speed achieved."""
    measured = [(pool, figures) for pool in data.pools if (figures := auto_figures(pool.first)) is not None]
    if not measured:
        return None
    figure, (time, speed) = panels(2, height=3.0, sharex=True)
    for i, (pool, figures) in enumerate(measured):
        sizes: list[int] = figures["sizes"]
        options = mark(i + 2) | {"label": pool.name}
        time.plot(sizes, [1e3 * seconds for seconds in figures["step_seconds"]], **options)
        speed.plot(sizes, figures["predicted_speedup_by_size"], **options)
        for run in (run for run in auto_runs(data.pools) if run.pool is pool):
            last, at = run.figures, run.figures["sizes"].index(run.figures["chosen"])
            speed.plot(last["sizes"][at], last["predicted_speedup_by_size"][at], "o", color="#000000", markersize=5)
            if run.achieved == run.achieved:
                speed.axhline(run.achieved, color=colour(i + 2), linewidth=0.9, linestyle=":")
    time.set_ylabel("step time (ms)")
    speed.set_ylabel("decoding speed\nover vanilla")
    speed.set_xlabel("nodes in the draft tree, root not counted")
    for axes in (time, speed):
        axes.margins(y=0.1)  # room for the dot
        axes.set_ylim(bottom=0)
    note = "dot: the size chosen last, or most often; dotted: speed achieved"
    return finish(figure, time, f"{note}; {data.measured}")


def start(data: FigureData) -> Figure | None:
    """MAT and speedup by the state at the start of a prompt (hot: kept between prompts; cold: reset), next to published
    ones."""
    rows = data.varied("start", ("recycle_prompt", "order"))
    if not rows or len({row["pool"].method for row in rows}) > 2:  # among many methods the other figures show it
        return None
    return _bars(data, rows, "start", published_starts())


def update(data: FigureData) -> Figure | None:
    """MAT and speedup by what a step writes to the matrix: every node, the accepted path, the root, nothing."""
    rows = data.varied("update", ("start", "order"))
    return _bars(data, rows, "update") if rows else None


def order(data: FigureData) -> Figure | None:
    """MAT and speedup by the order of the questions, for methods that keep state between prompts."""
    rows = [row for row in data.drafting if row.get("start") not in (None, "cold") and row["start"] == row["start"]]
    rows = [row | {"order": row["pool"].first.settings["bench"].get("order", "file")} for row in rows]
    if len({row["order"] for row in rows}) < 2:
        return None
    return _bars(data, rows, "order")


def published_starts() -> list[tuple[str, float, float]]:
    """Return (name, MAT, speedup) of the published hot and cold pair."""
    pair = [row for row in read_published("unofficial_a100_40gb") if row["method"].startswith("recycling (")]
    return [(f"{row['method'][11:-1]}, published", row["mat"], row["speedup"]) for row in pair]


def _bars(
    data: FigureData, rows: list[dict[str, Any]], setting: str, published: list[tuple[str, float, float]] | None = None
) -> Figure:
    """Draw two panels of horizontal bars, MAT and speedup (or tokens/s), one bar a run; published figures hatched."""
    speed, speed_label = speed_of(rows)
    labels = [_label(row, rows, setting) for row in rows]
    extra = published or []
    count = len(rows) + len(extra)
    columns = [("mat", "MAT (tokens per step)", 1), (speed, speed_label, 2)]
    columns = [entry for entry in columns if any(row[entry[0]] == row[entry[0]] for row in rows)]  # not all is timed
    figure, axes = panels(len(columns), height=(0.6 + 0.3 * len(columns)) + 0.18 * len(columns) * count, sharey=True)
    at = list(range(count))[::-1]
    for panel, (column, label, index) in zip(axes, columns, strict=True):
        panel.set_xlabel(label)
        values = [float(row[column]) for row in rows]
        panel.barh(at[: len(rows)], values, 0.7, color=colour(4))
        for y, row, value in zip(at, rows, values, strict=False):
            low, high = row[f"{column}_low"], row[f"{column}_high"]
            if low == low:
                panel.hlines(y, low, high, color="#000000", linewidth=0.9)
            panel.text(0, y, f" {value:.2f}" if column != "tokens_per_second" else f" {value:.0f}",
                       va="center", color="#ffffff", fontsize=6.5)  # fmt: skip
        if column != "tokens_per_second":
            panel.barh(at[len(rows) :], [entry[index] for entry in extra], 0.7, color="#ffffff", edgecolor="#777777",
                       hatch="////", linewidth=0.6)  # fmt: skip
        panel.set_yticks(at, labels + [entry[0] for entry in extra])
        sideways(panel)
        if column.startswith("speedup"):
            panel.axvline(1.0, color="#444444", linewidth=0.7)
    hatched = "; hatched: Vicuna-7B, A100-40GB" if extra else ""
    hatched += ", speedup over its own baseline" if extra and len(columns) > 1 else ""
    return finish(figure, axes[0], f"lines: {INTERVAL}{hatched}; {data.measured}")


def _label(row: dict[str, Any], rows: list[dict[str, Any]], setting: str) -> str:
    """Name a bar by its choice, and by the settings that distinguish it from others of the same choice."""
    facets = row["pool"].first.facets
    twins = [other["pool"].first.facets for other in rows if str(other[setting]) == str(row[setting])]
    words = [str(row[setting])]
    if len({other["pool"].method for other in rows}) > 1:
        words.insert(0, row["pool"].method)
    for key in facets:
        if key == "start":  # named at each bar or at none, so that other settings distinguish runs of the same start
            others = [other["pool"].first.facets for other in rows]
        else:
            others = [twin for twin in twins if twin.get("start") == facets.get("start")]
        if key != setting and len({str(other.get(key)) for other in others}) > 1:
            words.append(key if facets[key] is True else "" if facets[key] is False else f"{facets[key]}")
    return ", ".join(word for word in words if word)
