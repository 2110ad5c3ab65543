"""Questions and recorded answers in Spec-Bench's format, a JSON line each."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from model.errors import UserError, one_line, whole_characters

Row = dict[str, Any]
NGRAM = 4  # tokens that occur again or are new
HALF = re.compile(r"\\ud[89a-f]", re.IGNORECASE)  # half of a character, as JSON writes it
SCHEMA = 5  # version of this project's rows and metadata, raised when either changes its meaning


def accept_lengths(row: Row) -> list[int]:
    return [n for choice in row["choices"] for n in choice.get("accept_lengths") or ()]


def tokens_and_steps(row: Row) -> tuple[int, int]:
    """Count a question's tokens and steps; (0, 0) if its steps are not known."""
    lengths = accept_lengths(row)
    if lengths:
        return sum(lengths), len(lengths)
    turns: list[Any] = []
    for choice in row["choices"]:
        if "engine_means" in choice:
            turns += choice["decoding_steps"]
    if not turns or None in turns:
        return 0, 0
    return new_tokens(row), sum(turns)


def new_tokens(row: Row) -> int:
    return sum(sum(choice["new_tokens"]) for choice in row["choices"])


def wall_time(row: Row) -> float:
    """Return the seconds a question took, prefill included, over choices and turns."""
    return float(sum(sum(choice["wall_time"]) for choice in row["choices"]))


def question_speed(row: Row) -> float:
    seconds = wall_time(row)
    return new_tokens(row) / seconds if seconds > 0 else math.nan


def novel_tokens(prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Count an answer's tokens that end four tokens which occur nowhere earlier in either."""
    text = [*prompt, *answer]
    seen = set[tuple[int, ...]]()
    count = 0
    for end in range(NGRAM, len(text) + 1):
        ngram = tuple(text[end - NGRAM : end])
        count += end > len(prompt) and ngram not in seen
        seen.add(ngram)
    return count


def per_turn(rows: Sequence[Row], key: str) -> list[float]:
    """Return a key's numbers over all turns that decoded; empty if any row lacks the key."""
    values: list[float] = []
    for row in rows:
        for choice in row["choices"]:
            turns = choice.get(key) or []
            new = choice["new_tokens"]
            decoded = [value for value, tokens in zip(turns, new, strict=False) if tokens]
            if len(turns) != len(new) or None in decoded:
                return []
            values += decoded

    return values


def later_steps(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the seconds and number of the steps after each turn's first; NaN if unknown."""
    seconds = per_turn(rows, "decode_time")
    steps = per_turn(rows, "decoding_steps")
    if not seconds or not steps:
        return math.nan, math.nan
    return sum(seconds), sum(max(count - 1, 0) for count in steps)


def between(ends: Sequence[float]) -> list[int]:
    """Return each step's time in whole microseconds from the steps' end times in seconds."""
    microseconds = [round(1e6 * end) for end in (0.0, *ends)]
    return [max(later - earlier, 0) for earlier, later in itertools.pairwise(microseconds)]


def check_schema(recorded: Any, where: object) -> None:
    """Raise UserError if a row, or the settings of a run, have another schema."""
    schema = recorded.get("schema", "unknown") if isinstance(recorded, dict) else "unknown"
    if schema != SCHEMA:
        raise UserError(
            f"{where}: recorded by another version of this project (schema {schema}, this one reads"
            f" {SCHEMA}); run it again in another folder, or move it away"
        )


def check_rows(rows: Iterable[Row], where: object) -> None:
    """Raise UserError as `check_schema` does, for rows with step records."""
    for row in rows:
        if any("step_nodes" in choice for choice in row["choices"]):
            check_schema(row, where)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file's object; empty if there is none, or a broken one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) and not misfit(value, "jobs") else {}


def read_line(line: str, where: str) -> Any:
    """Return a line's JSON value. Half characters become U+FFFD, and `where` is printed.

    Raises ValueError or RecursionError for anything else.
    """
    value = json.loads(line)
    if not HALF.search(line):
        return value
    text = json.dumps(value, ensure_ascii=False)
    whole = whole_characters(text)
    if whole != text:
        print(f"{where}: a half character (a lone surrogate) became U+FFFD", file=sys.stderr)
    return json.loads(whole)


def read_answers(path: Path) -> tuple[dict[Any, Row], str]:
    """Read an answer file of any origin as `parse_answers` does. Raises UserError if it cannot."""
    try:
        # U+2028 and others are text
        lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"answer file {path}: {error.strerror}") from None

    return parse_answers(lines)


# Equal numbers share one object: a third of the memory of a large experiment.
_number = lru_cache(maxsize=1 << 17)(int)


def parse_answers(lines: Iterable[str]) -> tuple[dict[Any, Row], str]:
    """Return the rows by question id, and a description of what is wrong with the file.

    A line is left out if it is no JSON object with a question id and choices of turns with matching
    counts. Keys that Spec-Bench's own table of speeds does not need may be missing or null.
    """
    # by the id's text: 1 and "1" are one question, whose later answer counts
    rows: dict[str, Row] = {}
    broken = []
    without_lengths = 0

    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_int=_number)
            why = fault(row)
        except (ValueError, RecursionError):
            why = "not JSON, cut short?"
        if why:
            broken.append(f"line {number}: {why}")
            continue

        rows[str(row["question_id"])] = row
        without_lengths += any(choice.get("accept_lengths") is None for choice in row["choices"])

    damage = []
    if broken:
        damage.append(f"{len(broken)} broken line(s), first {broken[0]}")
    if without_lengths:
        count = f"{without_lengths} answer(s) without accept_lengths, which count in no MAT"
        damage.append(count)
    return {row["question_id"]: row for row in rows.values()}, "; ".join(damage)


_SCHEMA = yaml.safe_load(Path(__file__).with_name("schema.yaml").read_text(encoding="utf-8"))
_TYPES = {kind.__name__: kind for kind in (bool, dict, float, int, str, type(None))}


def check_record(metadata: dict[str, Any], where: object) -> None:
    """Raise UserError for another schema, or for a value of a wrong type."""
    check_schema(metadata.get("settings"), where)
    if why := misfit(metadata, "metadata"):
        raise UserError(f"{where}: its metadata is broken ({why})")


def fault(row: Any) -> str:
    """Say what is wrong with a line's answer; empty if nothing is."""
    if why := misfit(row, "row"):
        return why
    for choice in row["choices"]:
        if why := misfit(choice, "choice"):
            return why
        for key in ("new_tokens", "wall_time"):
            if len(choice[key]) != len(choice["turns"]):
                return f"{key}: must be one number a turn"

    return ""


def misfit(values: Any, table: str) -> str:
    """Name the first value that does not fit this table of schema.yaml; empty if all do."""
    if not isinstance(values, dict):
        return "not a JSON object"
    for place, words in _SCHEMA[table].items():
        *outer, key = place.split(".")
        inside = values
        for name in outer:
            inside = inside.get(name, {})

        value = inside.get(key)
        optional = "null" if key in inside else "optional"
        if value is None and optional in words:
            continue
        lacks_items = value == [] and "filled" in words
        if lacks_items or not fits(value, *_kinds(words)):
            return f"{place}: must be {words.partition(',')[0]}"

    return ""


@cache
def _kinds(words: str) -> tuple[int, tuple[type, ...]]:
    """Return in how many lists a value is nested, and its types."""
    names = re.findall(r"\w+", words)
    return names.count("list"), tuple(_TYPES[name] for name in names if name in _TYPES)


def fits(value: Any, lists: int, kinds: tuple[type, ...]) -> bool:
    """True if a value is of these types, in `lists` nested lists, with finite numbers from 0."""
    if lists:
        return isinstance(value, list) and all(fits(item, lists - 1, kinds) for item in value)
    return type(value) in kinds and (type(value) not in (int, float) or 0 <= value < 2**63)


def difference(
    before: Any, now: Any, where: str = "", words: tuple[str, str] = ("there", "now")
) -> str:
    """Name the first setting that differs, with both values and `words`; empty if none does."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted(before.keys() | now.keys())
        inside = (
            difference(before.get(k), now.get(k), f"{where}.{k}" if where else k, words)
            for k in keys
        )
        return next(filter(None, inside), "")

    if before == now:
        return ""
    old = "not recorded" if before is None and isinstance(now, dict) else _short(before)
    return f"{where} is {old} {words[0]} and {_short(now)} {words[1]}".rstrip()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else f"{text[:35]}...{text[-30:]}"


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
    """Return the row that a question counts in; an unknown category has its own."""
    if category in MT_BENCH:
        return "mt_bench"
    return f"{OVERALL} (category)" if category == OVERALL else category


@dataclass(frozen=True)
class Question:
    question_id: int | str
    category: str
    turns: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Hash of category and turns; it distinguishes questions of the same id."""
        return hashlib.sha256(json.dumps([self.category, *self.turns]).encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        return question_key(self.question_id, self.sha256)


def ids_sha256(ids: list[int]) -> str:
    return hashlib.sha256(str(ids).encode()).hexdigest()[:16]


def question_key(question_id: int | str, sha256: str | None) -> str:
    """Return the key that questions are paired by; without a recorded hash, it is the id."""
    return f"{question_id}:{sha256}" if sha256 else str(question_id)


def read_questions(path: Path) -> tuple[Question, ...]:
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
            where = f"{path}:{number}"
            try:
                yield where, read_line(line, where)
            except (ValueError, RecursionError):
                raise UserError(f"{where}: not JSON, cut short?") from None


def checked_questions(rows: Iterable[tuple[str, Any]], path: Path) -> tuple[Question, ...]:
    """Return the questions of rows, each given with its file and line, which a UserError names."""
    questions: dict[str, tuple[Question, str]] = {}  # by the id's text: 1 and "1" are the same id
    for where, row in rows:
        question = _question(row, where)
        _, first = questions.setdefault(str(question.question_id), (question, where))
        if first != where:
            raise UserError(f"{where}: question_id {question.question_id} is that of {first}, too")

    if not questions:
        raise UserError(f"question file {path} is empty")
    return tuple(question for question, _ in questions.values())


def _question(row: Any, where: str) -> Question:
    if why := misfit(row, "question"):
        raise UserError(f"{where}: {why}")
    if not all(map(str.strip, row["turns"])):
        raise UserError(f"{where}: turns: must hold no empty text")
    return Question(row["question_id"], row["category"], tuple(row["turns"]))
