"""A file of answers, of this project or any other: read, and told what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError

from .rows import Row


@dataclass
class Damage:
    """What was wrong with an answer file; nothing of it is fatal, all of it is told."""

    broken_lines: list[int]
    repeated: list[Any]

    def __str__(self) -> str:
        parts = []
        if self.broken_lines:
            parts.append(f"{len(self.broken_lines)} broken line(s): {some(self.broken_lines)}")
        if self.repeated:
            parts.append(f"{len(self.repeated)} question id(s) repeated, the later one counts: {some(self.repeated)}")
        return "; ".join(parts)


def some(items: list[Any], most: int = 8) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


class SharedNumbers(dict[str, int]):
    """Each number is one object, however often it stands in the files: a third of the memory of a large experiment."""

    def __missing__(self, text: str) -> int:
        self[text] = value = int(text)
        return value


def read_answers(path: Path, shared: SharedNumbers | None = None) -> tuple[dict[Any, Row], Damage]:
    """Read an answer file of any origin: rows by question id, and what was wrong with the file.

    A line is broken if it is no JSON object with a question id and one choice of turns with matching counts.

    Args:
        shared: numbers seen so far; give the same one for many files that are kept at once.

    Raises:
        UserError: the file cannot be opened.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")  # U+2028 and others are text
    except OSError as error:
        raise UserError(f"answer file {path}: {error.strerror}") from None
    rows: dict[Any, Row] = {}
    damage = Damage([], [])
    decoder = json.JSONDecoder(parse_int=(SharedNumbers() if shared is None else shared).__getitem__)
    rank_paths: dict[tuple[int, ...], list[int]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except json.JSONDecodeError:
            row = None
        if not _is_answer(row):
            damage.broken_lines.append(number)
            continue
        key = row["question_id"]
        if key in rows and key not in damage.repeated:
            damage.repeated.append(key)
        for choice in row["choices"]:  # the same few paths, over and over
            if choice.get("step_paths"):
                choice["step_paths"] = [[rank_paths.setdefault(tuple(p), p) for p in t] for t in choice["step_paths"]]
        rows[key] = row
    return rows, damage


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty if there is none, or a broken one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def common_questions(rows: dict[Any, Row], others: dict[Any, Row]) -> list[Any]:
    """The ids that both files have, less those whose recorded hashes say that they are different questions."""
    hashes = {key: [file[key].get("question_sha256") for file in (rows, others)] for key in rows if key in others}
    return [key for key, (one, other) in hashes.items() if None in (one, other) or one == other]


def _is_answer(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("question_id"), int | str):
        return False
    choices = row.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    for choice in choices:
        if not isinstance(choice, dict):
            return False
        turns, tokens, times = (choice.get(key) for key in ("turns", "new_tokens", "wall_time"))
        if not (isinstance(turns, list) and isinstance(tokens, list) and isinstance(times, list)):
            return False
        if not len(turns) == len(tokens) == len(times) > 0:
            return False
        if not all(isinstance(t, str) for t in turns) or not all(isinstance(x, int | float) for x in tokens + times):
            return False
        if not all(isinstance(x, int) for x in choice.get("accept_lengths", [])):
            return False
    return True
