"""A caption for each figure: what it shows, and the result in its numbers."""

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
from .facts import Configuration

PLAIN = 1.005  # a MAT up to this is plain decoding's, which reads 1.00
Caption = Callable[[str, pd.DataFrame, list[Configuration]], str]


def caption(stem: str, table: pd.DataFrame, ran: list[Configuration]) -> str:
    """Return the caption of the figure with this file name.

    Figures without an entry in CAPTIONS use the docstring of their function in evaluation.figures.

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
    """Return a figure's place on the page: those in CAPTIONS first, in that order, then the others by name."""
    kind, order = stem.split("-")[0], list(CAPTIONS)
    return order.index(kind) if kind in order else len(order), stem


def short(table: pd.DataFrame) -> list[str]:
    """Summarise the overall rows in a line per block of the table."""
    names = group_names(table)
    groups: dict[str, list[dict[Any, Any]]] = {}
    for row, _ in _overall(table):
        groups.setdefault(names[tuple(row[column] for column in GROUP)], []).append(row)
    lines = []
    for name, rows in groups.items():
        text = f"{name.replace(', ', ' on ', 1)}: "
        most = max((r for r in rows if _has(r, "mat")), key=lambda row: row["mat"], default=None)
        if drafts := most is not None and most["mat"] > PLAIN:
            text += f"{_name(most)} accepts most, {most['mat']:.2f} tokens per step (MAT). "
        if timed := [row for row in rows if _has(row, "tokens_per_second")]:
            fastest = max(timed, key=lambda row: row["tokens_per_second"])
            others = [name for name in BASELINES if name != fastest["method"]]
            over = [f"{fastest[c]:.2f} × {n}" for n in others if _has(fastest, c := f"speedup_{n}")]
            name = "It" if drafts and fastest is most else _name(fastest)
            text += f"{name} is fastest, {fastest['tokens_per_second']:,.0f} tokens/s"
            text += f" ({' and '.join(over)})." if over else "."
        lines.append(text)
    return lines


def _overall(table: pd.DataFrame) -> list[tuple[dict[Any, Any], list[dict[Any, Any]]]]:
    """Return the overall rows, each with its rows by subtask, which precede it in the table."""
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
    text = f"Speedup over {baseline} by subtask; 1 means as fast. "
    pairs = [pair for pair in _overall(table) if _has(pair[0], column) and pair[0]["method"] != baseline]
    if not pairs:
        return text.strip()
    (fastest, subtasks), *others = sorted(pairs, key=lambda pair: -pair[0][column])
    text += f"{_name(fastest)} is fastest, {fastest[column]:.2f} × overall"
    if measured := [row for row in subtasks if _has(row, column)]:
        text += f" and faster than {baseline} in {sum(row[column] > 1 for row in measured)} of {len(measured)} subtasks"
    slower = [row for row, _ in pairs if _has(row, f"{column}_high") and row[f"{column}_high"] < 1]
    text += _followed([(row, row[column]) for row, _ in others if row not in slower])
    return text + (f" Slower than {baseline} overall: {_figures([(r, r[column]) for r in slower])}." if slower else "")


def _mat(stem: str, table: pd.DataFrame, ran: list[Configuration]) -> str:
    text = "Tokens per step (MAT) by subtask; plain decoding adds 1. "
    pairs = [pair for pair in _overall(table) if _has(pair[0], "mat") and pair[0]["mat"] > PLAIN]
    if not pairs:
        return text + "No method here adds more than one."
    (most, subtasks), *others = sorted(pairs, key=lambda pair: -pair[0]["mat"])
    text += f"{_name(most)} adds most, {most['mat']:.2f} overall"
    measured = sorted((row for row in subtasks if _has(row, "mat")), key=lambda row: row["mat"])
    if len(measured) > 1:
        low, high = measured[0], measured[-1]
        text += f" (from {low['mat']:.2f} in {low['category']} to {high['mat']:.2f} in {high['category']})"
    return text + _followed([(row, row["mat"]) for row, _ in others])


def _lengths(stem: str, table: pd.DataFrame, ran: list[Configuration]) -> str:
    text = "Share of steps by the number of tokens that they added, the target's own token included. "
    sentences = []
    for configuration in ran:
        lengths = [n for row in configuration.pool.rows for n in accept_lengths(row)]
        if lengths and max(lengths) > 1:
            none = 100 * sum(n == 1 for n in lengths) / len(lengths)
            sentences.append(
                f"{configuration.name} adds only one token in {none:.0f} % of its steps, at least "
                f"{statistics.median_high(lengths)} in half of them, at most {max(lengths)}"
            )
    return text + _list(sentences)


def _over_questions(stem: str, table: pd.DataFrame, ran: list[Configuration]) -> str:
    text = (
        "MAT over the questions, in the order asked. State that is kept between prompts should make it rise; it also "
        "depends on the questions themselves. From the first quarter to the last: "
    )
    sentences = []
    for configuration in ran:
        steps = [accept_lengths(row) for row in configuration.pool.first_answers]
        quarter = len(steps) // 4
        if configuration.pool.first.settings["method"].get("start") and quarter:
            first, last = (
                statistics.mean(n for row in part for n in row) if any(part) else float("nan")
                for part in (steps[:quarter], steps[-quarter:])
            )
            sentences.append(f"{configuration.name} {first:.2f} to {last:.2f}")
    return text + _list(sentences) if sentences else text.rpartition(" From")[0]


def _followed(rows: list[tuple[dict[Any, Any], float]]) -> str:
    """End the sentence on the best with the next ones."""
    return f", followed by {_figures(rows[:2])}." if rows else "."


def _figures(rows: list[tuple[dict[Any, Any], float]]) -> str:
    return ", ".join(f"{_name(row)} ({value:.2f})" for row, value in rows)


def _list(sentences: list[str], most: int = 3) -> str:
    more = f"; and {len(sentences) - most} more" if len(sentences) > most else ""
    return "; ".join(sentences[:most]) + (more + "." if sentences else "")


CAPTIONS: dict[str, Caption] = {  # by the file's name up to its first "-"; in the order of the page
    "speedup_over_hf": _speedup,
    "speedup_over_vanilla": _speedup,
    "mat": _mat,
    "accepted_lengths": _lengths,
    "mat_over_questions": _over_questions,
}
