"""Methods at equal budgets: what they make of the same number of drafted nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..statistics.intervals import quotient_interval
from ..statistics.pools import paired
from .block import Block
from .style import INTERVAL, colour, footnote, legend, mark, panels

REFERENCE = "recycling"  # whose MAT the others are measured by


def budget(block: Block) -> Figure | None:
    """MAT, MAT over recycling's, and speed, over the most nodes that a step of the method drafts."""
    lines: dict[str, dict[int, dict[str, Any]]] = {}
    for row in block.drafting:
        if most := allowed(row):
            lines.setdefault(row["pool"].method, {})[most] = row
    lines = {name: line for name, line in lines.items() if len(line) > 2}
    if REFERENCE not in lines or len(lines) < 2:
        return None
    figure, (mats, gains, speeds) = panels(3, height=4.2, sharex=True)
    for i, (name, line) in enumerate(lines.items()):
        options = mark(i + 2) | {"label": name}
        at = sorted(line)
        for axes, column in ((mats, "mat"), (speeds, "speedup_vanilla")):
            axes.plot(at, [line[n][column] for n in at], **options)
            low, high = ([line[n][f"{column}_{end}"] for n in at] for end in ("low", "high"))
            axes.fill_between(at, low, high, color=colour(i + 2), alpha=0.15, linewidth=0)
        both = [n for n in at if n in lines[REFERENCE]]
        found = [gain(line[n], lines[REFERENCE][n]) for n in both]
        gains.plot(both, [value for value, _, _ in found], **options)
        gains.fill_between(both, [g[1] for g in found], [g[2] for g in found], color=colour(i + 2), alpha=0.15, lw=0)
    mats.set_ylabel("MAT\n(tokens a step)")
    gains.set_ylabel(f"MAT over\n{REFERENCE}'s")
    speeds.set_ylabel("speedup\nover vanilla")
    speeds.axhline(1.0, color="#444444", linewidth=0.7)
    speeds.set_xlabel("nodes that a step drafts at most, root not counted")
    legend(figure, mats)
    footnote(figure, f"shaded: {INTERVAL}, paired; {block.measured}")
    return figure


def allowed(row: dict[str, Any]) -> int | None:
    """The most nodes, root not counted, that a run's settings let a step draft; None of a method without such a one."""
    own = row["pool"].first.settings["method"]
    return next((int(own[key]) for key in ("nodes", "tree_nodes", "max_draft") if own.get(key)), None)


def gain(row: dict[str, Any], reference: dict[str, Any]) -> tuple[float, float, float]:
    """MAT over the reference's on the questions both have, and its paired interval."""
    both = paired(row["pool"].cells, reference["pool"].cells)
    columns = [np.nansum(values, axis=1) for cells in both for values in (cells.tokens, cells.steps)]
    value = (columns[0].sum() / columns[1].sum()) / (columns[2].sum() / columns[3].sum())
    return (float(value), *quotient_interval(*columns))
