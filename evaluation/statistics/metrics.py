"""The figures of answers, from their rows in Spec-Bench's format; columns.yaml defines each."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from ..records.rows import OVERALL as OVERALL
from ..records.rows import (
    SUBTASKS,
    Row,
    later_steps,
    new_tokens,
    per_turn,
    question_speed,
    subtask,
    tokens_and_steps,
    wall_time,
)

PERCENTILES = (50, 95, 99)
Item = TypeVar("Item")
Key = TypeVar("Key")


def choices(rows: Iterable[Row]) -> list[Row]:
    return [choice for row in rows for choice in row["choices"]]


def mean(values: Iterable[float]) -> float:
    items = list(values)
    return sum(items) / len(items) if items else math.nan


def measure(rows: Sequence[Row]) -> dict[str, Any]:
    """Compute the figures of these answers; NaN where the records lack what it needs."""
    counts = [tokens_and_steps(row) for row in rows]
    mat_tokens = sum(tokens for tokens, _ in counts)
    mat_steps = sum(steps for _, steps in counts)

    seconds = sum(map(wall_time, rows))
    tokens = sum(map(new_tokens, rows))
    later_seconds, later = later_steps(rows)
    batched = any("step_batch" in choice for choice in choices(rows))

    total = tokens / seconds if seconds > 0 else math.nan
    speed = total
    if not batched:
        speed = mean(question_speed(row) for row in rows if wall_time(row) > 0)

    prefill = per_turn(rows, "prefill_time")
    prompt = per_turn(rows, "prompt_time")
    # with concurrent requests to a server, each one's own wait
    waited = per_turn(rows, "first_token_time") or prefill
    if waited is prefill and batched:
        prompt = []  # prefill times are shares of a batch's, not the time to a first token
    first_token = [sum(pair) for pair in zip(prompt, waited, strict=False)]

    peaks: list[Any] = [row.get("peak_memory") for row in rows]
    peak = math.nan
    if peaks and None not in peaks:
        peak = float(max(peaks)) / 2**20

    return {
        "questions": len(rows),
        "turns": sum(len(choice["turns"]) for choice in choices(rows)),
        "steps": mat_steps,
        "new_tokens": tokens,
        "mat": mat_tokens / mat_steps if mat_steps else math.nan,
        "mat_macro": mean(n / steps for n, steps in counts if steps),
        "tokens_per_second": speed,
        "tokens_per_second_total": total,
        "tokens_per_second_decode": _decode_speed(rows),
        "prefill_ms": 1e3 * mean(prefill),
        "decode_ms": 1e3 * mean(per_turn(rows, "decode_time")),
        "time_to_first_token_ms": 1e3 * (mean(prompt) + mean(waited)),  # both over the same turns
        "step_ms": 1e3 * later_seconds / later if later else math.nan,
        "rows_per_forward": _rows_per_forward(rows),
        **percentiles("time_to_first_token_ms", first_token),
        **percentiles("inter_token_latency_ms", between_tokens(rows)),
        "peak_memory_mib": peak,
        **part_ms(rows),
        **engine_means(rows),
    }


def part_ms(rows: Sequence[Row]) -> dict[str, float]:
    """Return mean milliseconds of a step by its parts; empty where the run did not time them."""
    steps = 0
    seconds = Counter[str]()
    for choice in choices(rows):
        turns = zip(choice.get("phase_time") or [], choice.get("forwards") or [], strict=False)
        for times, forwards in turns:
            if times:
                steps += max(forwards - 1, 0)
                seconds.update(times)
    del seconds["prefill"]
    return {f"part_{part}_ms": 1e3 * value / steps for part, value in seconds.items() if steps}


def engine_means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean acceptance that servers' engines report, named as by them."""
    sums = Counter[str]()
    weights = Counter[str]()

    for choice in choices(rows):
        for means in choice.get("engine_means") or ():
            for name, (numerator, denominator) in (means or {}).items():
                sums[name] += numerator
                weights[name] += denominator

    return {name: sums[name] / weights[name] for name in sums}


def counts_between(
    row: Row,
    begin: int = 0,
    end: int = sys.maxsize,
    loops: bool = True,
    novel: tuple[float, float] | None = None,
) -> tuple[int, int]:
    """Return the tokens and steps of a question's steps that begin between two positions.

    Args:
        begin, end: positions in a turn's answer; a step that begins at `end` is not counted.
        loops: False: an answer counts up to `loop_start` only.
        novel: only turns whose `novelty` is known and in this half-open range.
    """
    tokens = 0
    steps = 0

    for choice in row["choices"]:
        shares = novelty(choice)
        for turn, lengths in enumerate(lengths_by_turn(choice)):
            if novel and not (shares and novel[0] <= shares[turn] < novel[1]):
                continue
            last = end if loops else min(end, loop_start(choice["output_ids"][turn]))
            position = 0
            for length in lengths:
                if begin <= position < last:
                    tokens += length
                    steps += 1
                position += length

    return tokens, steps


def novelty(choice: Row) -> list[float]:
    """Return the share of each turn's `novel_tokens`; empty if they were not counted."""
    pairs = zip(choice.get("novel_tokens") or [], choice["new_tokens"], strict=False)
    return [novel / max(tokens, 1) for novel, tokens in pairs]


def loop_start(ids: Sequence[int], length: int = 64) -> int:
    """Return the first position whose next tokens occur earlier; the answer's length if none."""
    seen = set[tuple[int, ...]]()
    for position in range(len(ids) - length + 1):
        ngram = tuple(ids[position : position + length])
        if ngram in seen:
            return position
        seen.add(ngram)

    return len(ids)


def between_tokens(rows: Sequence[Row]) -> list[float]:
    """Return the seconds of all steps but each turn's first; empty if any row lacks them."""
    seconds: list[float] = []
    for choice in choices(rows):
        turns = choice.get("step_us")
        if turns is None:
            return []
        for turn in turns:
            seconds += [us / 1e6 for us in turn[1:]]

    return seconds


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = 1e3 * np.percentile(seconds or [math.nan], PERCENTILES)
    columns = [f"{name}_p{percent}" for percent in PERCENTILES]
    return dict(zip(columns, values.tolist(), strict=True))


def lengths_by_turn(choice: Row) -> list[list[int]]:
    """Return the accepted lengths of each turn's steps; empty if steps have no known turn."""
    lengths = choice.get("accept_lengths")
    counts = choice.get("decoding_steps")
    if lengths is None or counts is None:
        return []
    if None in counts or sum(counts) != len(lengths):
        return []

    rest = iter(lengths)
    return [list(itertools.islice(rest, count)) for count in counts]


def _rows_per_forward(rows: Sequence[Row]) -> float:
    """Return draft nodes and roots per forward; NaN unless all rows have step records."""
    nodes = 0
    forwards = 0.0

    for choice in choices(rows):
        turns = choice.get("step_nodes")
        if turns is None:
            return math.nan
        nodes += sum(map(sum, turns))
        if sizes := choice.get("step_batch"):
            forwards += sum(1 / size for size in itertools.chain.from_iterable(sizes))
        else:
            forwards += sum(map(len, turns))

    return nodes / forwards if forwards else math.nan


def _decode_speed(rows: Sequence[Row]) -> float:
    """Return tokens per second after the first step of each turn, or NaN."""
    tokens = sum(map(new_tokens, rows))
    seconds = sum(per_turn(rows, "decode_time"))

    for choice in choices(rows):
        # of a server's turns: the tokens that came with the first event
        first_tokens = choice.get("first_tokens")
        if first_tokens:
            tokens -= sum(n or 0 for n in first_tokens)
            continue

        turns = lengths_by_turn(choice)
        if not turns:
            return math.nan
        tokens -= sum(lengths[0] for lengths in turns if lengths)

    return tokens / seconds if seconds > 0 else math.nan


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_subtask(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows as the tables print them: Spec-Bench's subtasks, then others by name, then all."""
    groups = grouped(rows, lambda row: subtask(str(row.get("category", "unknown"))))
    names = [name for name in SUBTASKS if name in groups]
    names += sorted(groups.keys() - set(SUBTASKS))

    by_name = {name: groups[name] for name in names}
    by_name[OVERALL] = list(rows)
    return by_name
