"""Answers as they are recorded, in Spec-Bench's format: what a row says, files of rows, how two of them differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from model.errors import UserError

Row = dict[str, Any]
SCHEMA = 4  # of rows and of metadata, in every one of this project: raised when either changes its meaning


def accept_lengths(row: Row) -> list[int]:
    """Return the accepted lengths of all steps of a question, over choices and turns."""
    return [n for choice in row["choices"] for n in choice.get("accept_lengths") or []]


def new_tokens(row: Row) -> int:
    """Count the new tokens of a question, over choices and turns."""
    return sum(sum(choice["new_tokens"]) for choice in row["choices"])


def wall_time(row: Row) -> float:
    """Return the seconds a question took, prefill included, over choices and turns."""
    return float(sum(sum(choice["wall_time"]) for choice in row["choices"]))


def question_speed(row: Row) -> float:
    """Return the tokens per second of one question; NaN where no time was spent."""
    seconds = wall_time(row)
    return new_tokens(row) / seconds if seconds > 0 else math.nan


def repeated_ngrams(before: Sequence[int], tokens: Sequence[int], n: int = 3) -> float | None:
    """Return the share of a text's n-grams that occur earlier, in it or in what is before it; None if it has none."""
    seen = set(zip(*(before[i:] for i in range(n)), strict=False))
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return 1 - len(set(grams) - seen) / len(grams) if grams else None


def check_schema(recorded: dict[str, Any], where: object) -> None:
    """Raise UserError if a row, or the settings of a run, have another schema."""
    if recorded.get("schema") != SCHEMA:
        raise UserError(
            f"{where}: recorded by another version of this project (schema {recorded.get('schema', 'unknown')}, this "
            f"one reads {SCHEMA}); run it again in another folder, or move it away"
        )


def check_rows(rows: Iterable[Row], where: object) -> None:
    """Raise UserError as `check_schema` for rows that hold steps; other people's hold none."""
    for row in rows:
        if any("step_nodes" in choice for choice in row["choices"]):
            check_schema(row, where)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file's object; empty if there is none, or a broken one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_answers(path: Path) -> tuple[dict[Any, Row], str]:
    """Read an answer file of any origin, as `parse_answers` does. Raises UserError if it cannot be opened."""
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")  # U+2028 and others are text
    except OSError as error:
        raise UserError(f"answer file {path}: {error.strerror}") from None
    return parse_answers(lines)


# A number that occurs in many answers is one object: a third of the memory of a large experiment.
_number = lru_cache(maxsize=1 << 17)(int)


def parse_answers(lines: Iterable[str]) -> tuple[dict[Any, Row], str]:
    """Parse answers, one a line: rows by question id, and in words what was wrong, which is left out.

    A line is broken if it is no JSON object with a question id and choices of turns with matching counts. A key that
    Spec-Bench's own table of speeds does without (accept_lengths, decoding_steps, ...) may be missing or null.
    """
    rows: dict[Any, Row] = {}
    broken: dict[int, str] = {}  # by line
    repeated: dict[Any, None] = {}
    without_lengths = []
    decoder = json.JSONDecoder(parse_int=_number)
    rank_paths: dict[tuple[int, ...], list[int]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (ValueError, RecursionError):  # no JSON, digits without end, brackets without end
            broken[number] = "not JSON, cut short?"
            continue
        if why := _fault(row):
            broken[number] = why
            continue
        key = row["question_id"]
        if key in rows:
            repeated[key] = None
        if any(choice.get("accept_lengths") is None for choice in row["choices"]):
            without_lengths.append(key)
        for choice in row["choices"]:  # the same few paths, over and over
            if choice.get("step_paths"):
                choice["step_paths"] = [[rank_paths.setdefault(tuple(p), p) for p in t] for t in choice["step_paths"]]
        rows[key] = row
    damage = []
    if broken:
        first = {why: number for number, why in reversed(broken.items())}  # a line for each reason
        reasons = "; ".join(f"line {number}: {why}" for why, number in reversed(first.items()))
        damage.append(f"{len(broken)} broken line(s): {_some(list(broken))} ({reasons})")
    if repeated:
        damage.append(f"{len(repeated)} question id(s) repeated, the later one counts: {_some(list(repeated))}")
    if without_lengths:
        count = f"{len(without_lengths)} answer(s) without accept_lengths, which count in no MAT"
        damage.append(f"{count}: {_some(without_lengths)}")
    return rows, "; ".join(damage)


def _some(items: list[Any], most: int = 8) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


# Of a choice, what may be missing: a number a turn, null where it was not measured; and a list a turn.
_MEASURED = ("decoding_steps", "prefill_time", "decode_time", "prompt_time")
_LISTS = ("output_ids", "step_nodes", "step_paths", "step_sources")


def _fault(row: Any) -> str:
    """Say what is wrong with a line's answer; empty if nothing is."""
    if not isinstance(row, dict):
        return "not a JSON object"
    if type(row.get("question_id")) not in (int, str):
        return "question_id: must be a whole number or text"
    if row.get("peak_memory") is not None and not _numbers([row["peak_memory"]]):
        return "peak_memory: must be a number from 0"
    if not row.get("choices") or not _list_of(row["choices"], dict):
        return "choices: must be a list of objects, at least one"
    return next(filter(None, map(_fault_of_choice, row["choices"])), "")


def _fault_of_choice(choice: Row) -> str:
    turns = choice.get("turns")
    if not turns or not _list_of(turns, str):
        return "turns: must be a list of texts, at least one"
    for key in ("new_tokens", "wall_time"):
        if not _numbers(choice.get(key)) or len(choice[key]) != len(turns):
            return f"{key}: must be a list of numbers from 0, one a turn"
    recorded = {key: value for key, value in choice.items() if value is not None}
    lengths = recorded.get("accept_lengths", [])
    if not _numbers(lengths) or not all(type(n) is int for n in lengths):
        return "accept_lengths: must be a list of whole numbers from 0"
    for key in _MEASURED:
        values = recorded.get(key, [])
        if not isinstance(values, list) or not _numbers([value for value in values if value is not None]):
            return f"{key}: must be a list of numbers from 0"
    for key in _LISTS:
        if not _list_of(recorded.get(key, []), list):
            return f"{key}: must be a list of lists, one a turn"
    if not all(_list_of(paths, list) for paths in recorded.get("step_paths", [])):
        return "step_paths: must be a list of lists of rank paths, one a turn"
    return ""


def _list_of(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _numbers(values: Any) -> bool:
    """Return whether this is a list of finite numbers from 0."""
    return isinstance(values, list) and all(
        type(value) in (int, float) and math.isfinite(value) and value >= 0 for value in values
    )


def difference(before: Any, now: Any, where: str = "") -> str:
    """Name the first setting in which two runs differ, values shortened; empty if none."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            words = difference(before.get(key), now.get(key), f"{where}.{key}" if where else key)
            if words:
                return words
        return ""
    there = "not recorded" if before is None and isinstance(now, dict) else _short(before)
    return "" if before == now else f"{where} is {there} there and {_short(now)} now"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else f"{text[:35]}...{text[-30:]}"


def common_turns(one: Row, other: Row) -> tuple[list[tuple[int, int, list[int], list[int]]], int]:
    """Return the turns answered from the same prompt: choice, turn, token ids of the one and of the other.

    Also how many turns are left out: those behind an answer that differs, as their prompts differ too.
    """
    turns, left_out = [], 0
    for index, choices in enumerate(zip(one["choices"], other["choices"], strict=False)):
        pairs = list(zip(*(choice.get("output_ids") or [] for choice in choices), strict=False))
        same = next((turn for turn, (a, b) in enumerate(pairs) if a != b), len(pairs))
        turns += [(index, turn, a, b) for turn, (a, b) in enumerate(pairs[: same + 1])]
        left_out += len(pairs[same + 1 :])
    return turns, left_out


def diverge(a: Any, b: Any) -> int:
    """Return the first index at which two sequences differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
