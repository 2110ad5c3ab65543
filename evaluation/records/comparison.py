"""What differs between two records: their settings, their questions, their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .answer_file import common_questions, some
from .rows import Row


def difference(held: Any, now: Any, where: str = "") -> str:
    """The first setting in which two runs differ, in words, values shortened; empty if none."""
    if isinstance(held, dict) and isinstance(now, dict):
        for key in sorted(held.keys() | now.keys()):
            found = difference(held.get(key), now.get(key), f"{where}.{key}" if where else key)
            if found:
                return found
        return ""
    there = "not recorded" if held is None and isinstance(now, dict) else _short(held)
    return "" if held == now else f"{where} is {there} there and {_short(now)} now"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else f"{text[:35]}...{text[-30:]}"


def first_difference(one: Row, other: Row) -> str | None:
    """Where two answers to a question differ first, in words; None if they are the same.

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
    """The turns that two rows answered from the same prompt: choice, turn, token ids of the one and of the other.

    Also how many turns are left out: those behind an answer that differs, as their prompts differ too.
    """
    found, left_out = [], 0
    for index, (choice, theirs) in enumerate(zip(one["choices"], other["choices"], strict=False)):
        pairs = list(zip(choice.get("output_ids") or [], theirs.get("output_ids") or [], strict=False))
        same = next((turn for turn, (a, b) in enumerate(pairs) if a != b), len(pairs))
        found += [(index, turn, a, b) for turn, (a, b) in enumerate(pairs[: same + 1])]
        left_out += len(pairs[same + 1 :])
    return found, left_out


def diverge(a: Any, b: Any) -> int:
    """The first index at which two sequences differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def describe_files(first: Path, rows: dict[Any, Row], second: Path, others: dict[Any, Row]) -> list[str]:
    """Which questions only one of two files has, in words; nothing if both have the same."""
    lines = []
    common = set(common_questions(rows, others))
    if changed := [key for key in rows if key in others and key not in common]:
        lines.append(f"{second}: {len(changed)} question(s) of the same id are others: {some(changed)}")
    for name, have, lack in ((second, rows, others), (first, others, rows)):
        missing = [key for key in have if key not in lack]
        if missing:
            lines.append(f"{name}: {len(missing)} question(s) missing: {some(missing)}")
    return lines
