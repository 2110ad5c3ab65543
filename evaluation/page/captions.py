"""A sentence for each figure: what it shows and what to conclude, from the numbers that it draws."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable
from typing import Any

import pandas as pd

from .. import figures
from ..records.rows import accept_lengths
from ..statistics.metrics import OVERALL
from ..statistics.tables import BASELINES, GROUP, group_names
from .circumstances import Configuration

PLAIN = 1.005  # a MAT up to this is plain decoding's, which reads 1.00
Caption = Callable[[str, pd.DataFrame, list[Configuration]], str]


def caption(stem: str, table: pd.DataFrame, ran: list[Configuration]) -> str:
    """Return the sentence for the figure of this file name.

    A figure that this module does not know by name has the docstring of the function in evaluation.figures that its
    file is named after.

    Args:
        table, ran: what the figure shows.
    """
    kind = stem.split("-")[0]
    if kind in CAPTIONS:
        return CAPTIONS[kind](stem, table, ran)
    function = getattr(figures, kind, None)
    doc = inspect.getdoc(function) if inspect.isfunction(function) else None
    return doc.split("\n\n")[0].replace("\n", " ") if doc else ""


def place(stem: str) -> tuple[int, str]:
    """Return where the page shows a figure: known ones in their order, others behind them by name."""
    kind, known = stem.split("-")[0], list(CAPTIONS)
    return known.index(kind) if kind in known else len(known), stem


def short(table: pd.DataFrame) -> list[str]:
    """Say the table's overall rows in a few sentences, one line a block of the table."""
    names = group_names(table)
    groups: dict[str, list[dict[Any, Any]]] = {}
    for row, _ in _overall(table):
        groups.setdefault(names[tuple(row[column] for column in GROUP)], []).append(row)
    lines = []
    for name, rows in groups.items():
        text = f"{name.replace(', ', ' on ', 1)}: "
        most = max((r for r in rows if _has(r, "mat")), key=lambda row: row["mat"], default=None)
        if most and most["mat"] > PLAIN:
            text += f"{_name(most)} accepts most, {most['mat']:.2f} tokens a step (MAT). "
        if timed := [row for row in rows if _has(row, "tokens_per_second")]:
            fastest = max(timed, key=lambda row: row["tokens_per_second"])
            others = [name for name in BASELINES if name != fastest["method"]]
            over = [f"{fastest[c]:.2f} × {n}" for n in others if _has(fastest, c := f"speedup_{n}")]
            text += f"Fastest is {_name(fastest)} with {fastest['tokens_per_second']:,.0f} tokens/s"
            text += f" ({' and '.join(over)})." if over else "."
        lines.append(text)
    return lines


def _overall(table: pd.DataFrame) -> list[tuple[dict[Any, Any], list[dict[Any, Any]]]]:
    """Return the overall rows, each with the rows by subtask that stand before it."""
    pairs: list[tuple[dict[Any, Any], list[dict[Any, Any]]]] = []
    before: list[dict[Any, Any]] = []
    for row in table.to_dict("records"):
        if row["category"] == OVERALL:
            pairs.append((row, before))
            before = []
        else:
            before.append(row)
    return pairs


def _has(row: dict[Any, Any], column: str) -> bool:
    return bool(pd.notna(row.get(column)))


def _name(row: dict[Any, Any]) -> str:
    return f"{row['method']}, {row['variant']}" if row.get("variant") else str(row["method"])


def _speedup(stem: str, table: pd.DataFrame, ran: list[Configuration]) -> str:
    baseline = stem.removeprefix("speedup_over_").split("-")[0]
    column = f"speedup_{baseline}"
    parts = []
    pairs = [pair for pair in _overall(table) if _has(pair[0], column) and pair[0]["method"] != baseline]
    for row, subtasks in sorted(pairs, key=lambda pair: -pair[0][column]):
        if known := [r for r in subtasks if _has(r, column)]:
            gains = sum(r[column] > 1 for r in known)
            parts.append(f"{_name(row)} {row[column]:.2f} × overall, faster in {gains} of {len(known)} subtasks")
    text = f"Tokens per second over those of {baseline}, by subtask; the line at 1 is no gain. "
    return text + _list(parts)


def _mat(stem: str, table: pd.DataFrame, ran: list[Configuration]) -> str:
    parts = []
    pairs = [pair for pair in _overall(table) if _has(pair[0], "mat") and pair[0]["mat"] > PLAIN]
    for row, subtasks in sorted(pairs, key=lambda pair: -pair[0]["mat"]):
        known = sorted((r for r in subtasks if _has(r, "mat")), key=lambda r: r["mat"])
        part = f"{_name(row)} {row['mat']:.2f} overall"
        if len(known) > 1:
            low, high = known[0], known[-1]
            part += f", from {low['mat']:.2f} ({low['category']}) to {high['mat']:.2f} ({high['category']})"
        parts.append(part)
    text = "Tokens that a step adds on average (MAT), by subtask; plain decoding is 1. "
    return text + (_list(parts) or "No method here adds more than one.")


def _lengths(stem: str, table: pd.DataFrame, ran: list[Configuration]) -> str:
    text = "How many tokens a step adds: share of steps by accepted length, the model's own token included. "
    parts = []
    for configuration in ran:
        lengths = [n for row in configuration.pool.rows for n in accept_lengths(row)]
        if lengths and max(lengths) > 1:
            none = 100 * sum(n == 1 for n in lengths) / len(lengths)
            parts.append(
                f"{configuration.name}: {none:.0f} % of steps gain nothing, half add "
                f"{statistics.median_high(lengths)} or more, the best {max(lengths)}"
            )
    return text + _list(parts)


def _over_questions(stem: str, table: pd.DataFrame, ran: list[Configuration]) -> str:
    text = "MAT along the run: a state that is carried on should rise from left to right, a cold one should not. "
    parts = []
    for configuration in ran:
        steps = [accept_lengths(row) for row in configuration.pool.first_answers]
        quarter = len(steps) // 4
        if configuration.pool.first.settings["method"].get("start") and quarter:
            first, last = (
                statistics.mean(n for row in part for n in row) if any(part) else float("nan")
                for part in (steps[:quarter], steps[-quarter:])
            )
            parts.append(f"{configuration.name}: {first:.2f} in the first quarter of the run, {last:.2f} in the last")
    return text + _list(parts)


def _list(parts: list[str], most: int = 3) -> str:
    more = f"; and {len(parts) - most} more" if len(parts) > most else ""
    return "; ".join(parts[:most]) + (more + "." if parts else "")


CAPTIONS: dict[str, Caption] = {  # by the file's name up to its first "-"; in the order of the page
    "speedup_over_hf": _speedup,
    "speedup_over_vanilla": _speedup,
    "mat": _mat,
    "accepted_lengths": _lengths,
    "mat_over_questions": _over_questions,
}
