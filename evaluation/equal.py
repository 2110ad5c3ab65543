"""python -m evaluation.equal: do two answer files hold the same answers? Exit code 0 if so, 1 if not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .errors import user_errors
from .records.rows import common_questions, describe_files, first_difference, read_answers


def compare_files(first: Path, second: Path) -> bool:
    """Print the differences. Returns True if the files are undamaged and have the same questions and answers."""
    (rows, damage), (others, other_damage) = read_answers(first), read_answers(second)
    notes = [f"{path}: {problem}" for path, problem in ((first, damage), (second, other_damage)) if str(problem)]
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
        equal = compare_files(arguments.file_path / arguments.jsonfile1, arguments.file_path / arguments.jsonfile2)
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
