"""Bars over a choice: where the state starts, what is written back, in which order the questions come."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from ..statistics.published import read_published
from .block import Block, speed_of
from .style import INTERVAL, colour, footnote, panels


def start(block: Block) -> Figure | None:
    """What the state at the start of a prompt is worth: MAT and speedup by start, a published pair beside it."""
    rows = block.varied("start", ("recycle_prompt", "order"))
    if not rows or len({row["pool"].method for row in rows}) > 2:  # among many methods the other figures show it
        return None
    return _bars(block, rows, "start", published_starts())


def update(block: Block) -> Figure | None:
    """What is written back to the matrix: every node, the accepted path, the root, nothing."""
    rows = block.varied("update", ("start", "order"))
    return _bars(block, rows, "update") if rows else None


def order(block: Block) -> Figure | None:
    """How much a method that carries state owes to the order of its questions."""
    rows = [row for row in block.drafting if row.get("start") not in (None, "cold") and row["start"] == row["start"]]
    rows = [row | {"order": row["pool"].first.settings["bench"].get("order", "file")} for row in rows]
    if len({row["order"] for row in rows}) < 2:
        return None
    return _bars(block, rows, "order")


def published_starts() -> list[tuple[str, float, float]]:
    """(name, MAT, speedup) of the published hot and cold pair."""
    own = [row for row in read_published("unofficial_a100_40gb") if row["method"].startswith("recycling (")]
    return [(f"{row['method'][11:-1]}, published", row["mat"], row["speedup"]) for row in own]


def _bars(
    block: Block, rows: list[dict[str, Any]], setting: str, published: list[tuple[str, float, float]] | None = None
) -> Figure:
    """Two panels of horizontal bars, MAT and speedup (or tokens/s), one bar a run; published figures hatched."""
    speed, speed_label = speed_of(rows)
    labels = [_label(row, rows, setting) for row in rows]
    extra = published or []
    count = len(rows) + len(extra)
    columns = [("mat", "MAT (tokens a step)", 1), (speed, speed_label, 2)]
    columns = [entry for entry in columns if any(row[entry[0]] == row[entry[0]] for row in rows)]  # not all is timed
    figure, axes = panels(len(columns), height=(0.6 + 0.3 * len(columns)) + 0.18 * len(columns) * count, sharey=True)
    at = list(range(count))[::-1]
    for panel, (column, label, place) in zip(axes, columns, strict=True):
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
            panel.barh(at[len(rows) :], [entry[place] for entry in extra], 0.7, color="#ffffff", edgecolor="#777777",
                       hatch="////", linewidth=0.6)  # fmt: skip
        panel.set_yticks(at, labels + [entry[0] for entry in extra])
        panel.grid(axis="x")
        panel.grid(axis="y", visible=False)
        if column.startswith("speedup"):
            panel.axvline(1.0, color="#444444", linewidth=0.7)
    hatched = "; hatched: Vicuna-7B, A100-40GB, speedup over its own baseline" if extra else ""
    footnote(figure, f"lines: {INTERVAL}{hatched}; {block.measured}")
    return figure


def _label(row: dict[str, Any], rows: list[dict[str, Any]], setting: str) -> str:
    """The choice, and what else tells the bar from others of the same choice."""
    twins = [other for other in rows if str(other[setting]) == str(row[setting])]
    words = [str(row[setting])]
    if len({other["pool"].method for other in rows}) > 1:
        words.insert(0, row["pool"].method)
    mine = row["pool"].first.facets
    for key in mine:
        if key != setting and len({str(other["pool"].first.facets.get(key)) for other in twins}) > 1:
            words.append(key if mine[key] is True else "" if mine[key] is False else f"{mine[key]}")
    return ", ".join(word for word in words if word)
