"""Questions in Spec-Bench's JSONL format, read from disk and checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import SURROGATE, UserError, one_line

from .rows import Schema, misfit

# Spec-Bench rolls its eight MT-bench labels up into one subtask (evaluation/speed.py there); others
# keep their name.
OVERALL = "overall"  # the row of all questions
MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
FILE_ORDER = "file"
INTERLEAVED = "interleaved"
SHUFFLED = "shuffled"
SUBTASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "code")


def subtask(category: str) -> str:
    """Return the row that a question counts in.

    An unknown category has its own row, never that of all questions.
    """
    if category in MT_BENCH:
        return "mt_bench"
    return f"{OVERALL} (category)" if category == OVERALL else category


@dataclass(frozen=True)
class Question:
    """One question: one or more turns of a user."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Hash of category and turns, first 16 digits.

        It distinguishes questions of the same id.
        """
        return hashlib.sha256(json.dumps([self.category, *self.turns]).encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        return question_key(self.question_id, self.sha256)


def question_key(question_id: int | str, sha256: str | None) -> str:
    """Return the key that questions are paired by.

    It is id and hash, or only the id if no hash was recorded.
    """
    return f"{question_id}:{sha256}" if sha256 else str(question_id)


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read and check a question file. Raises UserError naming file and line."""
    return checked_questions(read_rows(path), path)


def read_rows(path: Path, kind: str = "question file") -> Iterator[tuple[str, Any]]:
    """Yield file and line number of each line of a JSONL file, and its value.

    Raises UserError naming both.
    """
    try:
        # no splitlines(): U+2028 and others are text
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"{kind} {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{kind} {path} cannot be read ({one_line(error)})") from None

    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{path}:{number}: not JSON, cut short?") from None


def checked_questions(rows: Iterable[tuple[str, Any]], path: Path) -> tuple[Question, ...]:
    """Return the questions of rows, each given with its file and line.

    Raises UserError naming these.
    """
    found: dict[str, tuple[Question, str]] = {}  # by the id's text: 1 and "1" are the same id
    for where, row in rows:
        question = _question(row, where)
        _, first = found.setdefault(str(question.question_id), (question, where))
        if first != where:
            raise UserError(f"{where}: question_id {question.question_id} is that of {first}, too")

    if not found:
        raise UserError(f"question file {path} is empty")
    return tuple(question for question, _ in found.values())


def _question(row: Any, where: str) -> Question:
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    kinds: Schema = {"question_id": (0, (int, str)), "category": (0, (str,)), "turns": (1, (str,))}
    if why := misfit(row, kinds, tuple(kinds)):  # the check that records use
        raise UserError(f"{where}: {why}")
    if not all(map(str.strip, row["turns"])):
        raise UserError(f"{where}: turns: must hold no empty text")
    question = Question(row["question_id"], row["category"], tuple(row["turns"]))
    if SURROGATE.search(f"{question.question_id} {question.category} {' '.join(question.turns)}"):
        raise UserError(f"{where}: holds a lone surrogate, which is no text")
    return question
