"""One answer as it is recorded: a row in Spec-Bench's format, and what is read off it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from model.errors import UserError

Row = dict[str, Any]


RECORDS = 2  # how step records count, in every row and run of this project; before it had a number it was otherwise


def accept_lengths(row: Row) -> list[int]:
    """Accepted lengths of all steps of a question, over choices and turns."""
    return [n for choice in row["choices"] for n in choice.get("accept_lengths") or []]


def check_records(rows: Iterable[Row], where: object) -> None:
    """Refuse step records of another count: once, a step was given its root and not the target's own next token.

    Raises:
        UserError: names the file.
    """
    for row in rows:
        if any("step_nodes" in choice for choice in row["choices"]) and row.get("records") != RECORDS:
            raise UserError(
                f"{where}: recorded by an earlier version, which counted steps otherwise (their accepted lengths do "
                "not compare); run it again, or move it away"
            )


def new_tokens(row: Row) -> int:
    """New tokens of a question, over choices and turns."""
    return sum(sum(choice["new_tokens"]) for choice in row["choices"])


def wall_time(row: Row) -> float:
    """Seconds a question took, prefill included, over choices and turns."""
    return float(sum(sum(choice["wall_time"]) for choice in row["choices"]))


def repeated_ngrams(before: Sequence[int], tokens: Sequence[int], n: int = 3) -> float | None:
    """Share of a text's n-grams of tokens that stand earlier, in it or in what is before it; None where it has none."""
    seen = set(zip(*(before[i:] for i in range(n)), strict=False))
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return 1 - len(set(grams) - seen) / len(grams) if grams else None


def question_speed(row: Row) -> float:
    """Tokens per second of one question; NaN where no time was spent."""
    seconds = wall_time(row)
    return new_tokens(row) / seconds if seconds > 0 else float("nan")
