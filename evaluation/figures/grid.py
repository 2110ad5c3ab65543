"""Many methods at once: a grid of numbers on colours, which stays readable where marks would cover one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from .block import Block
from .style import footnote, panels


def grid(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    label: str,
    block: Block,
    *,
    middle: float | None = None,
    decimals: int = 2,
) -> Figure:
    """One row a method, one column a category, the number in each cell; NaN stays empty.

    Args:
        middle: where the colours turn (no gain), darker blue above it and darker orange below; None: from 0 up.
    """
    cells = np.array(values, dtype=float)  # (rows, columns)
    figure, (axes,) = panels(height=0.75 + 0.155 * len(rows))
    known = cells[np.isfinite(cells)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if middle is None:
        axes.imshow(cells, cmap="Blues", vmin=0, vmax=high * 1.25, aspect="auto")
        shade = cells / max(high * 1.25, 1e-9)
    else:
        norm = TwoSlopeNorm(middle, min(low, middle - 0.1), max(high, middle + 0.1))
        axes.imshow(cells, cmap="PuOr", norm=norm, aspect="auto")
        shade = np.abs(np.ma.filled(norm(cells), 0.5) - 0.5) * 2
    for (y, x), value in np.ndenumerate(cells):
        if np.isfinite(value):
            dark = shade[y, x] > 0.62
            axes.text(x, y, f"{value:.{decimals}f}", ha="center", va="center", fontsize=5, color="w" if dark else "k")
    slanted: dict[str, Any] = (
        {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if max(map(len, columns)) > 3 else {}
    )
    axes.set_xticks(range(len(columns)), columns, fontsize=6, **slanted)
    axes.set_yticks(range(len(rows)), rows, fontsize=6)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(label, fontsize=7)
    footnote(figure, block.measured)
    return figure
