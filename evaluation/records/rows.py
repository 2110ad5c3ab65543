"""Answers as they are recorded, in Spec-Bench's format: what a row says, files of rows, how two of them differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.errors import UserError

Row = dict[str, Any]
SCHEMA = 4  # of rows and of metadata, in every one of this project: raised when either changes its meaning


def accept_lengths(row: Row) -> list[int]:
    """Return the accepted lengths of all steps of a question, over choices and turns."""
    return [n for choice in row["choices"] for n in choice.get("accept_lengths") or []]


def check_schema(held: dict[str, Any], where: object) -> None:
    """Refuse a row or the settings of a run whose schema is another one.

    Raises:
        UserError: names the file.
    """
    if held.get("schema") != SCHEMA:
        raise UserError(
            f"{where}: recorded by another version of this project (schema {held.get('schema', 'unknown')}, this one "
            f"reads {SCHEMA}); run it again in another folder, or move it away"
        )


def check_rows(rows: Iterable[Row], where: object) -> None:
    """Raise UserError as `check_schema` for rows that hold steps; other people's hold none."""
    for row in rows:
        if any("step_nodes" in choice for choice in row["choices"]):
            check_schema(row, where)


def new_tokens(row: Row) -> int:
    """Count the new tokens of a question, over choices and turns."""
    return sum(sum(choice["new_tokens"]) for choice in row["choices"])


def wall_time(row: Row) -> float:
    """Return the seconds a question took, prefill included, over choices and turns."""
    return float(sum(sum(choice["wall_time"]) for choice in row["choices"]))


def repeated_ngrams(before: Sequence[int], tokens: Sequence[int], n: int = 3) -> float | None:
    """Return the share of a text's n-grams that stand earlier, in it or in what is before it; None if it has none."""
    seen = set(zip(*(before[i:] for i in range(n)), strict=False))
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return 1 - len(set(grams) - seen) / len(grams) if grams else None


def question_speed(row: Row) -> float:
    """Return the tokens per second of one question; NaN where no time was spent."""
    seconds = wall_time(row)
    return new_tokens(row) / seconds if seconds > 0 else float("nan")


@dataclass
class Damage:
    """What was wrong with an answer file; nothing of it is fatal, all of it is reported.

    Attributes:
        broken: by line, what is wrong with it; these lines are left out.
        repeated: question ids that stand in several lines.
        without_lengths: question ids of answers that record no accepted lengths.
    """

    broken: dict[int, str] = field(default_factory=dict)
    repeated: list[Any] = field(default_factory=list)
    without_lengths: list[Any] = field(default_factory=list)

    @property
    def broken_lines(self) -> list[int]:
        return list(self.broken)

    def __str__(self) -> str:
        parts = []
        if self.broken:
            first = {why: number for number, why in reversed(self.broken.items())}  # a line for each reason
            reasons = "; ".join(f"line {number}: {why}" for why, number in reversed(first.items()))
            parts.append(f"{len(self.broken)} broken line(s): {some(self.broken_lines)} ({reasons})")
        if self.repeated:
            parts.append(f"{len(self.repeated)} question id(s) repeated, the later one counts: {some(self.repeated)}")
        if self.without_lengths:
            lacking = f"{len(self.without_lengths)} answer(s) without accept_lengths, which count in no MAT"
            parts.append(f"{lacking}: {some(self.without_lengths)}")
        return "; ".join(parts)


def some(items: list[Any], most: int = 8) -> str:
    """Name the first of them, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


class SharedNumbers(dict[str, int]):
    """Each number is one object, however often it stands in the files: a third of the memory of a large experiment."""

    def __missing__(self, text: str) -> int:
        self[text] = value = int(text)
        return value


def read_answers(path: Path, shared: SharedNumbers | None = None) -> tuple[dict[Any, Row], Damage]:
    """Read an answer file of any origin, as `parse_answers` does its lines.

    Raises:
        UserError: the file cannot be opened.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")  # U+2028 and others are text
    except OSError as error:
        raise UserError(f"answer file {path}: {error.strerror}") from None
    return parse_answers(lines, SharedNumbers() if shared is None else shared)


def parse_answers(lines: Iterable[str], shared: SharedNumbers) -> tuple[dict[Any, Row], Damage]:
    """Parse answers, one a line: rows by question id, and what was wrong with them.

    A line is broken if it is no JSON object with a question id and choices of turns with matching counts. A key that
    Spec-Bench's own table of speeds does without (accept_lengths, decoding_steps, ...) may be missing or null.

    Args:
        shared: numbers seen so far; give the same one for many files that are kept at once.
    """
    rows: dict[Any, Row] = {}
    damage = Damage()
    decoder = json.JSONDecoder(parse_int=shared.__getitem__)
    rank_paths: dict[tuple[int, ...], list[int]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (ValueError, RecursionError):  # no JSON, digits without end, brackets without end
            damage.broken[number] = "not JSON, cut short?"
            continue
        if why := _fault(row):
            damage.broken[number] = why
            continue
        key = row["question_id"]
        if key in rows and key not in damage.repeated:
            damage.repeated.append(key)
        if any(choice.get("accept_lengths") is None for choice in row["choices"]):
            damage.without_lengths.append(key)
        for choice in row["choices"]:  # the same few paths, over and over
            if choice.get("step_paths"):
                choice["step_paths"] = [[rank_paths.setdefault(tuple(p), p) for p in t] for t in choice["step_paths"]]
        rows[key] = row
    return rows, damage


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file's object; empty if there is none, or a broken one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def common_questions(rows: dict[Any, Row], others: dict[Any, Row]) -> list[Any]:
    """Return the ids that both files have, less those whose recorded hashes differ."""
    hashes = {key: [file[key].get("question_sha256") for file in (rows, others)] for key in rows if key in others}
    return [key for key, (one, other) in hashes.items() if None in (one, other) or one == other]


# Of a choice, what may be missing: a number a turn, null where it was not measured (of another count: not known); and
# a list a turn.
_MEASURED = ("decoding_steps", "prefill_time", "decode_time", "prompt_time")
_LISTS = ("output_ids", "step_nodes", "step_paths", "step_sources")


def _fault(row: Any) -> str:
    """Say what is wrong with a line's answer; empty if nothing is."""
    if not isinstance(row, dict):
        return "not a JSON object"
    if type(row.get("question_id")) not in (int, str):
        return "question_id: must be a whole number or text"
    if not (row.get("peak_memory") is None or _is_number(row["peak_memory"])):
        return "peak_memory: must be a number from 0"
    choices = row.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        return "choices: must be a list of objects, at least one"
    return next(filter(None, map(_fault_of_choice, choices)), "")


def _fault_of_choice(choice: Row) -> str:
    turns = choice.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        return "turns: must be a list of texts, at least one"
    for key in ("new_tokens", "wall_time"):
        if not _numbers(choice.get(key), len(turns)):
            return f"{key}: must be a list of numbers from 0, one a turn"
    lengths = choice.get("accept_lengths")
    if lengths is not None and not (isinstance(lengths, list) and all(type(n) is int and n >= 0 for n in lengths)):
        return "accept_lengths: must be a list of whole numbers from 0"
    for key in _MEASURED:
        values = choice.get(key)
        known = [v for v in values if v is not None] if isinstance(values, list) else values
        if values is not None and not _numbers(known):
            return f"{key}: must be a list of numbers from 0"
    for key in _LISTS:
        values = choice.get(key)
        if values is not None and not (isinstance(values, list) and all(isinstance(v, list) for v in values)):
            return f"{key}: must be a list of lists, one a turn"
    if not all(isinstance(path, list) for paths in choice.get("step_paths") or [] for path in paths):
        return "step_paths: must be a list of lists of rank paths, one a turn"
    return ""


def _numbers(values: Any, count: int | None = None) -> bool:
    """Return whether these are so many numbers from 0; None: however many."""
    return isinstance(values, list) and count in (None, len(values)) and all(map(_is_number, values))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def difference(held: Any, now: Any, where: str = "") -> str:
    """Name the first setting in which two runs differ, values shortened; empty if none."""
    if isinstance(held, dict) and isinstance(now, dict):
        for key in sorted(held.keys() | now.keys()):
            words = difference(held.get(key), now.get(key), f"{where}.{key}" if where else key)
            if words:
                return words
        return ""
    there = "not recorded" if held is None and isinstance(now, dict) else _short(held)
    return "" if held == now else f"{where} is {there} there and {_short(now)} now"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else f"{text[:35]}...{text[-30:]}"


def first_difference(one: Row, other: Row) -> str | None:
    """Say where two answers to a question differ first; None if they are the same.

    Token ids are compared where both rows hold them, the text of every turn in any case.
    """
    pairs = list(zip(one["choices"], other["choices"], strict=False))
    if len(one["choices"]) != len(other["choices"]):
        return f"{len(one['choices'])} choices against {len(other['choices'])}"
    for index, (a, b) in enumerate(pairs):
        if len(a["turns"]) != len(b["turns"]):
            return f"choice {index}: {len(a['turns'])} turns against {len(b['turns'])}"
        ids = list(zip(a.get("output_ids") or [], b.get("output_ids") or [], strict=False))
        for turn, (mine, theirs) in enumerate(ids):
            if mine != theirs:
                return f"choice {index}, turn {turn}: token {diverge(mine, theirs)}"
        for turn, (mine, theirs) in enumerate(zip(a["turns"], b["turns"], strict=True)):
            if mine != theirs:
                return f"choice {index}, turn {turn}: character {diverge(mine, theirs)}"
    return None


def common_turns(one: Row, other: Row) -> tuple[list[tuple[int, int, list[int], list[int]]], int]:
    """Return the turns answered from the same prompt: choice, turn, token ids of the one and of the other.

    Also how many turns are left out: those behind an answer that differs, as their prompts differ too.
    """
    turns, left_out = [], 0
    for index, (choice, theirs) in enumerate(zip(one["choices"], other["choices"], strict=False)):
        pairs = list(zip(choice.get("output_ids") or [], theirs.get("output_ids") or [], strict=False))
        same = next((turn for turn, (a, b) in enumerate(pairs) if a != b), len(pairs))
        turns += [(index, turn, a, b) for turn, (a, b) in enumerate(pairs[: same + 1])]
        left_out += len(pairs[same + 1 :])
    return turns, left_out


def diverge(a: Any, b: Any) -> int:
    """Return the first index at which two sequences differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def describe_files(first: Path, rows: dict[Any, Row], second: Path, others: dict[Any, Row]) -> list[str]:
    """Say which questions only one of two files has; nothing if both have the same."""
    lines = []
    common = set(common_questions(rows, others))
    if changed := [key for key in rows if key in others and key not in common]:
        lines.append(f"{second}: {len(changed)} question(s) of the same id are others: {some(changed)}")
    for name, have, lack in ((second, rows, others), (first, others, rows)):
        missing = [key for key in have if key not in lack]
        if missing:
            lines.append(f"{name}: {len(missing)} question(s) missing: {some(missing)}")
    return lines
