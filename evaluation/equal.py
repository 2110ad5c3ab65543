"""python -m evaluation.equal: do two answer files hold the same answers? Exit code 0 if so, 1 if not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .answers import Row, common_questions, read_answers
from .cli import user_errors
from .speed import describe_files


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


def compare(first: Path, second: Path) -> bool:
    """Print what differs and say whether the files are equal: no damage, same questions, same answers."""
    (rows, damage), (others, other_damage) = read_answers(first), read_answers(second)
    notes = [f"{path}: {found}" for path, found in ((first, damage), (second, other_damage)) if str(found)]
    notes += describe_files(first, rows, second, others)
    common = common_questions(rows, others)
    different = {key: where for key in common if (where := first_difference(rows[key], others[key]))}
    for note in notes:
        print(f"note: {note}")
    for key, where in list(different.items())[:20]:
        print(f"question {key} differs: {where}")
    if len(different) > 20:
        print(f"... and {len(different) - 20} more")
    print(f"{len(common) - len(different)} of {len(common)} common questions are identical")
    broken = bool(damage.broken_lines or other_damage.broken_lines)
    equal = bool(common) and not different and len(rows) == len(others) == len(common) and not broken
    print("equal" if equal else "NOT equal")
    return equal


def main() -> None:
    flags = argparse.ArgumentParser(prog="python -m evaluation.equal", description=__doc__)
    flags.add_argument("--file-path", type=Path, default=Path(), help="folder of both files")
    flags.add_argument("--jsonfile1", required=True)
    flags.add_argument("--jsonfile2", required=True)
    arguments = flags.parse_args()
    with user_errors():
        equal = compare(arguments.file_path / arguments.jsonfile1, arguments.file_path / arguments.jsonfile2)
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
