"""Methods at equal budgets: what they make of the same number of drafted nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..statistics.intervals import quotient_interval
from ..statistics.pools import paired
from .block import TREE, Block, alike
from .style import INTERVAL, colour, footnote, legend, mark, panels

BUDGETS = ("nodes", "tree_nodes", "max_draft")  # settings that say how many nodes a step drafts at most
REFERENCE = "recycling"  # whose MAT the others are measured by


def budget(block: Block) -> Figure | None:
    """MAT, MAT over recycling's, and speed, over the most nodes that a step of the method drafts."""
    lines: dict[str, dict[int, dict[str, Any]]] = {}
    rows = [row | {"budget": most} for row in block.drafting if row["tree"] != "shape" and (most := allowed(row))]
    for method in dict.fromkeys(row["pool"].method for row in rows):
        own = alike([row for row in rows if row["pool"].method == method], {*TREE, *BUDGETS}, "budget")
        lines[method] = {row["budget"]: row for row in own}
    lines = {name: line for name, line in lines.items() if len(line) > 2}
    if REFERENCE not in lines or len(lines) < 2:
        return None
    timed = any(row["speedup_vanilla"] == row["speedup_vanilla"] for line in lines.values() for row in line.values())
    figure, drawn = panels(2 + timed, height=1.2 + 1.0 * (2 + timed), sharex=True)
    mats, gains = drawn[:2]
    columns = list(zip((mats, *drawn[2:]), ("mat", "speedup_vanilla"), strict=False))
    for i, (name, line) in enumerate(lines.items()):
        options = mark(i + 2) | {"label": name}
        at = sorted(line)
        for axes, column in columns:
            axes.plot(at, [line[n][column] for n in at], **options)
            low, high = ([line[n][f"{column}_{end}"] for n in at] for end in ("low", "high"))
            axes.fill_between(at, low, high, color=colour(i + 2), alpha=0.15, linewidth=0)
        both = [n for n in at if n in lines[REFERENCE]]
        found = [gain(line[n], lines[REFERENCE][n]) for n in both]
        gains.plot(both, [value for value, _, _ in found], **options)
        gains.fill_between(both, [g[1] for g in found], [g[2] for g in found], color=colour(i + 2), alpha=0.15, lw=0)
    mats.set_ylabel("MAT\n(tokens a step)")
    gains.set_ylabel(f"MAT over\n{REFERENCE}'s")
    for axes in drawn[2:]:
        axes.set_ylabel("speedup\nover vanilla")
        axes.axhline(1.0, color="#444444", linewidth=0.7)
    drawn[-1].set_xlabel("nodes that a step drafts at most, root not counted")
    legend(figure, mats)
    footnote(figure, f"shaded: {INTERVAL}, paired; {block.measured}")
    return figure


def allowed(row: dict[str, Any]) -> int | None:
    """The most nodes, root not counted, that a run's settings let a step draft; None of a method without such a one."""
    own = row["pool"].first.settings["method"]
    return next((int(own[key]) for key in BUDGETS if own.get(key)), None)


def gain(row: dict[str, Any], reference: dict[str, Any]) -> tuple[float, float, float]:
    """MAT over the reference's on the questions both have, and its paired interval."""
    both = paired(row["pool"].cells, reference["pool"].cells)
    columns = [np.nansum(values, axis=1) for cells in both for values in (cells.tokens, cells.steps)]
    value = (columns[0].sum() / columns[1].sum()) / (columns[2].sum() / columns[3].sum())
    return (float(value), *quotient_interval(*columns))
