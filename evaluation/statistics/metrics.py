"""What the numbers mean. Every one is derived from answer rows in Spec-Bench's format; see docs/concepts.md.

Definitions:
    step: one target forward over a root, the last token known, with a draft below it; the first root is the prompt's
        last token.
    accepted length: tokens a step adds to the output: the accepted drafts and the model's own next token. Plain
        decoding: 1.
    mat: micro mean of accepted lengths over all steps. mat_macro: mean over questions of the question's own mean.
    tokens_per_second: mean over questions of (new tokens / wall time, prefill included); Spec-Bench's figure.
    tokens_per_second_total: all new tokens / all wall time.
    tokens_per_second_decode: all new tokens after each turn's first step / all decoding time (prefill excluded).
    prefill_ms, decode_ms: mean over turns, until a turn's first step is done and from then on. step_ms: all decoding
        time / all steps but the first of each turn.
    time_to_first_token_ms: mean over turns, from the question's text to the first new token: prompt and prefill.
    peak_memory_mib: the largest over questions of what the devices (on the CPU: the process) held.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..records.questions import SUBTASKS, subtask
from ..records.rows import Row, accept_lengths, new_tokens, question_speed, wall_time

OVERALL = "overall"


@dataclass(frozen=True)
class Measures:
    """The figures of one group of answers; NaN where the records do not hold what a figure needs."""

    questions: int
    turns: int
    steps: int
    new_tokens: int
    mat: float
    mat_macro: float
    tokens_per_second: float
    tokens_per_second_total: float
    tokens_per_second_decode: float
    prefill_ms: float
    decode_ms: float
    time_to_first_token_ms: float
    step_ms: float
    peak_memory_mib: float


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean; NaN of nothing."""
    items = list(values)
    return sum(items) / len(items) if items else float("nan")


def measure(rows: Sequence[Row]) -> Measures:
    """Compute the figures of these answers, one row a question."""
    lengths = [accept_lengths(row) for row in rows]
    seconds = sum(wall_time(row) for row in rows)
    tokens = sum(new_tokens(row) for row in rows)
    return Measures(
        questions=len(rows),
        turns=sum(len(choice["turns"]) for row in rows for choice in row["choices"]),
        steps=sum(len(steps) for steps in lengths),
        new_tokens=tokens,
        mat=mean(n for steps in lengths for n in steps),
        mat_macro=mean(mean(steps) for steps in lengths if steps),
        tokens_per_second=mean(question_speed(row) for row in rows if wall_time(row) > 0),
        tokens_per_second_total=tokens / seconds if seconds > 0 else float("nan"),
        tokens_per_second_decode=_decode_speed(rows),
        **_times(rows),
        peak_memory_mib=_peak(rows),
    )


def repetition(row: Row) -> float:
    """Return the mean over a question's turns of the share of repeated 3-grams; NaN where the row does not say."""
    turns = [share for choice in row["choices"] for share in choice.get("repeated_3grams") or []]
    shares = [share for share in turns if share is not None]
    return sum(shares) / len(shares) if shares else math.nan


def _peak(rows: Sequence[Row]) -> float:
    peaks: list[Any] = [row.get("peak_memory") for row in rows]
    return float(max(peaks)) / 2**20 if peaks and None not in peaks else math.nan


def _times(rows: Sequence[Row]) -> dict[str, float]:
    """Return milliseconds of a turn's parts and of a step; NaN where a row does not hold what a figure needs."""
    prefill = per_turn(rows, "prefill_time")
    decode, prompt = per_turn(rows, "decode_time"), per_turn(rows, "prompt_time")
    steps = sum(max(n - 1, 0) for n in per_turn(rows, "decoding_steps"))
    seconds = sum(decode) if decode else math.nan
    first = mean(prompt) + mean(prefill)  # both over the same turns
    return {
        "prefill_ms": 1e3 * mean(prefill),
        "decode_ms": 1e3 * mean(decode),
        "time_to_first_token_ms": 1e3 * first,
        "step_ms": 1e3 * seconds / steps if steps else math.nan,
    }


def per_turn(rows: Sequence[Row], key: str) -> list[float]:
    """Return a key that holds one number a turn, over all turns that decoded; empty if any row lacks it."""
    values: list[float] = []
    for row in rows:
        for choice in row["choices"]:
            if not _known(choice, key):
                return []
            values += [value for value, tokens in zip(choice[key], choice["new_tokens"], strict=True) if tokens]
    return values


def _known(choice: Row, key: str) -> bool:
    """Return whether a choice has a number for each of its turns."""
    values = choice.get(key)
    return values is not None and None not in values and len(values) == len(choice["new_tokens"])


def _decode_speed(rows: Sequence[Row]) -> float:
    """Return NaN unless every row knows its decoding time apart from the prefill, and its steps."""
    tokens, seconds = 0, 0.0
    for row in rows:
        for choice in row["choices"]:
            known = all(_known(choice, key) for key in ("decode_time", "decoding_steps"))
            if not known or choice.get("accept_lengths") is None:
                return float("nan")
            tokens += sum(choice["new_tokens"]) - sum(_first_lengths(choice))
            seconds += sum(choice["decode_time"])
    return tokens / seconds if seconds > 0 else float("nan")


def _first_lengths(choice: Row) -> list[int]:
    """Return the accepted length of each turn's first step."""
    lengths = iter(choice["accept_lengths"])
    turns = [list(itertools.islice(lengths, count)) for count in choice["decoding_steps"]]
    return [turn[0] for turn in turns if turn]


def by_subtask(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows as the tables print them: Spec-Bench's subtasks, then others by name, then all."""
    items = list(rows)
    groups: dict[str, list[Row]] = {}
    for row in items:
        groups.setdefault(subtask(str(row.get("category", "unknown"))), []).append(row)
    names = [name for name in SUBTASKS if name in groups] + sorted(groups.keys() - set(SUBTASKS))
    return {name: groups[name] for name in names} | {OVERALL: items}
