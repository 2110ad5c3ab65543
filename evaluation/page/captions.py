"""Words from the main table and the figures: a line a block of the table, a sentence a figure."""

from __future__ import annotations

import inspect
from typing import Any

import pandas as pd

from .. import figures
from ..statistics.metrics import OVERALL
from ..statistics.tables import BASELINES, blocks

PLAIN = 1.005  # a MAT up to this is plain decoding's, which reads 1.00


def captions() -> dict[str, str]:
    """Return the docstring of each figure by its name, in the order of the page."""
    return {
        draw.__name__: " ".join((inspect.getdoc(draw) or "").split()) for draw in (*figures.FIGURES, *figures.ACROSS)
    }


def short(table: pd.DataFrame) -> list[str]:
    """Summarise the overall rows in a line per block of the table."""
    lines = []
    for name, block in blocks(table[table["category"] == OVERALL]).items():
        rows = block.to_dict("records")
        text = f"{name.replace(', ', ' on ', 1)}: "
        most = max((row for row in rows if pd.notna(row["mat"])), key=lambda row: row["mat"], default=None)
        if drafts := most is not None and most["mat"] > PLAIN:
            text += f"{_name(most)} accepts most, {most['mat']:.2f} tokens per step (MAT). "
        if timed := [row for row in rows if pd.notna(row["tokens_per_second"])]:
            fastest = max(timed, key=lambda row: row["tokens_per_second"])
            others = [name for name in BASELINES if name != fastest["method"] and pd.notna(fastest[f"speedup_{name}"])]
            over = " and ".join(f"{fastest[f'speedup_{name}']:.2f} × {name}" for name in others)
            who = "It" if drafts and fastest is most else _name(fastest)
            text += f"{who} is fastest, {fastest['tokens_per_second']:,.0f} tokens/s{f' ({over})' if over else ''}."
        lines.append(text)
    return lines


def _name(row: dict[Any, Any] | None) -> str:
    return ", ".join(filter(None, (str(row["method"]), row["variant"]))) if row else ""
