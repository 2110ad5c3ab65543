"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table's lines, its head first."""
    head = list(columns)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def shown(value: Any, form: str = ".2f") -> str:
    """A cell: floats in this form, nothing as a dash."""
    if value is None or value != value:
        return "-"
    return format(value, form) if isinstance(value, float) else str(value)
