"""The figures of answers, from their rows in Spec-Bench's format; columns.yaml defines each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from ..records.questions import OVERALL as OVERALL
from ..records.questions import SUBTASKS, subtask
from ..records.rows import (
    Row,
    later_steps,
    new_tokens,
    per_turn,
    question_speed,
    tokens_and_steps,
    wall_time,
)

PERCENTILES = (50, 95, 99)
Item = TypeVar("Item")
Key = TypeVar("Key")


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean; NaN of nothing."""
    items = list(values)
    return sum(items) / len(items) if items else float("nan")


def measure(rows: Sequence[Row]) -> dict[str, Any]:
    """Compute the figures of these answers, one row a question; NaN where the records lack what a
    figure needs.
    """
    counts = [tokens_and_steps(row) for row in rows]
    counted, taken = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    seconds = sum(map(wall_time, rows))
    tokens = sum(map(new_tokens, rows))
    prefill, decode, prompt = (
        per_turn(rows, f"{part}_time") for part in ("prefill", "decode", "prompt")
    )
    # with concurrent requests to a server, each one's own wait
    waited = per_turn(rows, "first_token_time") or prefill
    peaks: list[Any] = [row.get("peak_memory") for row in rows]
    batched = any("step_batch" in choice for row in rows for choice in row["choices"])
    later_seconds, later = later_steps(rows)
    total = tokens / seconds if seconds > 0 else math.nan
    if waited is prefill and batched:
        prompt = []  # prefill times are shares of a batch's, not the time to a first token
    return {
        "questions": len(rows),
        "turns": sum(len(choice["turns"]) for row in rows for choice in row["choices"]),
        "steps": taken,
        "new_tokens": tokens,
        "mat": counted / taken if taken else math.nan,
        "mat_macro": mean(n / steps for n, steps in counts if steps),
        "tokens_per_second": (
            total if batched else mean(question_speed(row) for row in rows if wall_time(row) > 0)
        ),
        "tokens_per_second_total": total,
        "tokens_per_second_decode": _decode_speed(rows),
        "prefill_ms": 1e3 * mean(prefill),
        "decode_ms": 1e3 * mean(decode),
        "time_to_first_token_ms": 1e3 * (mean(prompt) + mean(waited)),  # both over the same turns
        "step_ms": 1e3 * later_seconds / later if later else math.nan,
        "rows_per_forward": _rows_per_forward(rows),
        **percentiles(
            "time_to_first_token_ms", [sum(pair) for pair in zip(prompt, waited, strict=False)]
        ),
        **percentiles("inter_token_latency_ms", between_tokens(rows)),
        "peak_memory_mib": float(max(peaks)) / 2**20 if peaks and None not in peaks else math.nan,
        **engine_means(rows),
    }


def engine_means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean acceptance that servers' engines report, by their names for it, over all
    turns.
    """
    turns = (
        means
        for row in rows
        for choice in row["choices"]
        for means in choice.get("engine_means") or ()
        if means
    )
    by_name = grouped(
        ((name, *pair) for means in turns for name, pair in means.items()), lambda mean: mean[0]
    )
    return {
        name: sum(a for _, a, _ in means) / sum(b for *_, b in means)
        for name, means in by_name.items()
    }


def repetition(row: Row) -> float:
    """Return the mean over a question's turns of the share of repeated 3-grams; NaN where the row
    does not say.
    """
    turns = [share for choice in row["choices"] for share in choice.get("repeated_3grams") or []]
    return mean(share for share in turns if share is not None)


def counts_between(row: Row, begin: int, end: int, loops: bool = True) -> tuple[int, int]:
    """Return the tokens and steps of a question's steps that begin between two positions of their
    answer.

    Args:
        begin, end: positions; a step that begins at `end` is not counted.
        loops: False: an answer counts up to `loop_start` only.
    """
    tokens = 0
    steps = 0
    for choice in row["choices"]:
        turns = lengths_by_turn(choice)
        lasts = (
            [end] * len(turns)
            if loops
            else [min(end, loop_start(ids)) for ids in choice["output_ids"]]
        )
        for lengths, last in zip(turns, lasts, strict=True):
            starts = itertools.accumulate(lengths, initial=0)
            counted = [
                length
                for start, length in zip(starts, lengths, strict=False)
                if begin <= start < last
            ]
            tokens = tokens + sum(counted)
            steps = steps + len(counted)
    return tokens, steps


def loop_start(ids: Sequence[int], length: int = 64) -> int:
    """Return the first position whose next `length` tokens occur earlier in the answer; the
    answer's length if none.
    """
    seen: set[tuple[int, ...]] = set()
    for position in range(len(ids) - length + 1):
        run = tuple(ids[position : position + length])
        if run in seen:
            return position
        seen.add(run)
    return len(ids)


def between_tokens(rows: Sequence[Row]) -> list[float]:
    """Return the seconds of all steps after the first of their turn; empty if any row lacks
    them.
    """
    turns = [choice.get("step_us") for row in rows for choice in row["choices"]]
    return (
        []
        if None in turns
        else [us / 1e6 for of_choice in turns for turn in of_choice for us in turn[1:]]
    )


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of latencies in ms, as columns; NaN of none."""
    values = (
        1e3 * np.percentile(seconds, PERCENTILES)
        if seconds
        else np.full(len(PERCENTILES), math.nan)
    )
    return {
        f"{name}_p{percent}": float(value)
        for percent, value in zip(PERCENTILES, values, strict=True)
    }


def lengths_by_turn(choice: Row) -> list[list[int]]:
    """Return the accepted lengths of each turn's steps; empty if the row does not say which turn a
    step belongs to.
    """
    lengths = choice.get("accept_lengths")
    counts = choice.get("decoding_steps")
    if lengths is None or counts is None or None in counts or sum(counts) != len(lengths):
        return []
    rest = iter(lengths)
    return [list(itertools.islice(rest, count)) for count in counts]


def _rows_per_forward(rows: Sequence[Row]) -> float:
    """Return the number of draft nodes and roots per forward; NaN unless every row has step
    records.
    """
    nodes = 0
    forwards = 0.0
    for choice in (choice for row in rows for choice in row["choices"]):
        if choice.get("step_nodes") is None:
            return math.nan
        nodes += sum(map(sum, choice["step_nodes"]))
        batch = choice.get("step_batch") or [[1] * len(turn) for turn in choice["step_nodes"]]
        forwards += sum(1 / size for turn in batch for size in turn)
    return nodes / forwards if forwards else math.nan


def _decode_speed(rows: Sequence[Row]) -> float:
    """Return tokens per second after the first step of each turn; NaN unless every row has times
    and steps.
    """
    tokens = sum(map(new_tokens, rows))
    seconds = sum(per_turn(rows, "decode_time"))
    for choice in (choice for row in rows for choice in row["choices"]):
        # of a server's turns: the tokens that came with the first event
        firsts = choice.get("first_tokens")
        turns = [[n or 0] for n in firsts] if firsts else lengths_by_turn(choice)
        if not turns:
            return math.nan
        tokens -= sum(lengths[0] for lengths in turns if lengths)
    return tokens / seconds if seconds > 0 else math.nan


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by their keys, both in the order of the items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_subtask(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows as the tables print them: Spec-Bench's subtasks, then others by name, then all."""
    groups = grouped(rows, lambda row: subtask(str(row.get("category", "unknown"))))
    names = [name for name in SUBTASKS if name in groups] + sorted(groups.keys() - set(SUBTASKS))
    return {name: groups[name] for name in names} | {OVERALL: list(rows)}
