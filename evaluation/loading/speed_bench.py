"""SPEED-Bench (NVIDIA, arXiv 2604.09557): its files as published, or as NVIDIA's prepare.py writes them.

Rows have question_id, category and turns (JSONL: messages), and others that are not read. The licences of some sources
keep their text out of the published parquet files: those prompts are placeholders until prepare.py fetches them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from model.errors import UserError, one_line

from ..records.questions import Question, checked_questions, read_rows

QUALITATIVE = (
    *("coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization"),
    "writing",
)
THROUGHPUT = ("low_entropy", "mixed", "high_entropy")
PREFIX = "speed_"  # its categories are rows of their own, and not Spec-Bench's of the same name
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
PREPARE = (
    "https://raw.githubusercontent.com/NVIDIA-NeMo/Skills/5ac8609a56ac941540b10c92e68d556e6343cd4c/"
    "nemo_skills/dataset/speed-bench/prepare.py"
)


def read_speed_bench(path: Path) -> tuple[Question, ...]:
    """Read a file of SPEED-Bench. Raises UserError naming file and row, or what reads parquet."""
    rows = _parquet_rows(path) if path.suffix == ".parquet" else read_rows(path)
    return checked_questions(((where, _row(row, where)) for where, row in rows), path)


def _row(row: Any, where: str) -> Any:
    """Return a row in Spec-Bench's layout; what is wrong with its fields is said by the check of all layouts."""
    if not isinstance(row, dict):
        return row
    category, messages = row.get("category"), row.get("messages")
    if isinstance(category, str) and category not in (*QUALITATIVE, *THROUGHPUT):
        known = ", ".join((*QUALITATIVE, *THROUGHPUT))
        raise UserError(f"{where}: category {category!r} is none of SPEED-Bench's ({known}); is this its file?")
    if isinstance(messages, list):
        said = [message if isinstance(message, dict) else {} for message in messages]
        if any(message.get("role", "user") != "user" for message in said):  # it would be asked as a question
            raise UserError(f"{where}: a message's role is not user; SPEED-Bench has no other; is this its file?")
        row = row | {"turns": [message.get("content") for message in said]}
    return row | {"category": f"{PREFIX}{category}"} if isinstance(category, str) else row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place of each row and the row, as `read_rows` does for JSONL."""
    if not path.is_file():
        raise UserError(f"question file {path} does not exist")
    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise UserError(
            f"{path}: parquet is read by pyarrow, which is not installed; pip install pyarrow, or name a JSONL file of "
            f"{PREPARE} with bench.path="
        ) from None
    except Exception as error:  # of many kinds, pandas' and pyarrow's, for a damaged file
        raise UserError(f"question file {path} is no parquet ({one_line(error)[:200]})") from None
    for number, row in enumerate(frame.to_dict("records"), start=1):
        turns: Any = row.get("turns")  # an array of text
        yield f"{path}: row {number}", row | {"turns": list(turns) if isinstance(turns, np.ndarray) else turns}


def is_placeholder(question: Question) -> bool:
    """True if the text of one of its turns was not published."""
    return any(PLACEHOLDER in turn for turn in question.turns)


def refuse_placeholders(questions: Iterable[Question], file: Path) -> None:
    """Raise UserError if the text of a prompt is missing, with their number in each category."""
    missing = Counter(question.category for question in questions if is_placeholder(question))
    if missing:
        counts = ", ".join(f"{category} {n}" for category, n in sorted(missing.items()))
        raise UserError(
            f"{file}: {missing.total()} prompts are placeholders, as their licences keep the text out ({counts}); fill "
            f"them by {PREPARE} and name its file with bench.path=, or leave them out with bench.placeholders=skip"
        )
