"""Write the sample bench: `python -m tools.embedded.sample`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from model.errors import UserError
from model.files import write_text
from tools.embedded.corpus import held_out
from tools.embedded.dialogue import Dialogue

FOLDER = Path("data/sample")
# The first question id of each file; ids never overlap.
FILES = {"question.jsonl": ("sample", 1), "warmup.jsonl": ("warmup", 9001)}


def lines(bench: Sequence[Dialogue], first: int) -> str:
    """A question file in Spec-Bench's format."""
    rows = (dialogue.row(first + i) for i, dialogue in enumerate(bench))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def contents() -> dict[str, str]:
    """The text of each file of the sample."""
    return {file: lines(held_out()[bench], first) for file, (bench, first) in FILES.items()}


def main(arguments: list[str] | None = None) -> int:
    """Write every file."""
    parser = argparse.ArgumentParser(prog="python -m tools.embedded.sample", description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        for file, text in contents().items():
            write_text(options.output / file, text)
            print(f"{options.output / file}: {text.count(chr(10))} questions")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
