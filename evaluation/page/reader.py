"""Single answers for the page's reader: token pieces by step."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from model.errors import UserError
from model.files import ROOT

from ..records.compact import FILE
from ..records.questions import read_questions, subtask
from ..records.rows import Row
from ..records.runs import Run, row_key
from ..statistics.metrics import lengths_by_turn
from ..statistics.pools import Pool
from .tokens import Decoder, spelled

MOST_QUESTIONS = 24
MOST_PROMPT = 600  # characters of a question's turn that are shown


def collect(ran: dict[str, Pool], decoder: Decoder) -> dict[str, Any]:
    """Collect what the reader shows: `runs`, `questions`, `texts` (each once), `answers`; and what was left out.

    Questions are taken from all subtasks in turn, each with the answers of all configurations. Of several answers to a
    question, and of repeats, the first is taken.
    """
    runs = [pool.first for pool in ran.values()]
    texts = _Texts(decoder)
    rows = [{row_key(row): row for row in pool.first_answers} for pool in ran.values()]
    order = _in_turn(rows)
    prompts = _prompts(runs)
    questions: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for key, category in order[:MOST_QUESTIONS]:
        answers += [
            {"run": i, "question": len(questions), "turns": _turns(run, answered[key], texts)}
            for i, (run, answered) in enumerate(zip(runs, rows, strict=True))
            if key in answered
        ]
        shown_id = str(next(answered[key] for answered in rows if key in answered)["question_id"])
        questions.append({"id": shown_id, "category": category, "turns": prompts.get(key, [])})
    return {
        "runs": list(ran),
        "questions": questions,
        "answers": answers,
        "texts": texts.items,
        "notes": _notes(ran, len(questions), len(order), decoder),
    }


def _in_turn(rows: list[dict[Any, Row]]) -> list[tuple[Any, str]]:
    """Order (question, category) with one question of each subtask in turn, so that a part shows every subtask."""
    category_of: dict[Any, str] = {}
    for answered in rows:
        for key, row in answered.items():
            category_of.setdefault(key, str(row.get("category", "unknown")))
    counts: dict[str, int] = {}
    places = []
    for i, (key, category) in enumerate(category_of.items()):
        group = subtask(category)
        counts[group] = counts.get(group, 0) + 1
        places.append((counts[group], i, key, category))
    return [(key, category) for _, _, key, category in sorted(places, key=lambda p: p[:2])]


class _Texts:
    """Texts by number, each once: methods that are lossless share theirs."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.items: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def add(self, run: Run, text: str, ids: list[int] | None) -> int:
        pieces = self.decoder.pieces(run, ids) if ids else None
        item = {"pieces": pieces} if pieces is not None else {"text": text}
        key = json.dumps(item)
        if key not in self._numbers:
            self._numbers[key] = len(self.items)
            self.items.append(item)
        return self._numbers[key]


def _turns(run: Run, row: Row, texts: _Texts) -> list[dict[str, Any]]:
    """Return each turn of the first answer: its text, and its steps' lengths, paths and nodes where recorded."""
    choice = row["choices"][0]
    lengths = lengths_by_turn(choice)
    ids, paths, nodes = (choice.get(key) or [] for key in ("output_ids", "step_paths", "step_nodes"))
    turns = []
    for i, text in enumerate(choice["turns"]):
        turn: dict[str, Any] = {"text": texts.add(run, text, ids[i] if i < len(ids) else None)}
        turn["lengths"] = lengths[i] if lengths else []
        if i < len(paths):
            turn["paths"] = [spelled(tuple(path)) for path in paths[i]]
        if i < len(nodes):
            turn["nodes"] = nodes[i]
        turns.append(turn)
    return turns


def _prompts(runs: list[Run]) -> dict[Any, list[str]]:
    """Read the questions' own turns, by key, from the bench's file where it is still the one that was run."""
    prompts: dict[Any, list[str]] = {}
    for path, digest in dict.fromkeys(map(_bench_file, runs)):
        file = ROOT / path / "question.jsonl" if (ROOT / path).is_dir() else ROOT / path
        try:
            if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                continue
            for question in read_questions(file):
                for key in (question.key, str(question.question_id)):
                    prompts.setdefault(key, [t[:MOST_PROMPT] + " …" * (len(t) > MOST_PROMPT) for t in question.turns])
        except (OSError, UserError):
            continue  # the page shows the question's number and category, as for other people's files
    return prompts


def _bench_file(run: Run) -> tuple[str, str]:
    given = run.metadata.get("config", {}).get("bench", {})
    return str(given.get("path", "")), str(run.settings["bench"].get("sha256"))


def _notes(ran: dict[str, Pool], shown: int, total: int, decoder: Decoder) -> list[str]:
    """Say what the reader does not show."""
    texts = all(pool.first.has_texts for pool in ran.values())
    instead = "as recorded, with the accepted lengths below them" if texts else "as accepted lengths only"
    notes = []
    if shown < total:
        where = "runs/*/answers.jsonl" if texts else FILE
        notes.append(f"Shown are {shown} of {total} questions, some of each subtask. All answers are in {where}.")
    if not texts:
        notes.append("These records hold token ids and no text; the model's tokenizer decodes them where it is here.")
    if any(len(pool.repeats) > 1 or any(len(row["choices"]) > 1 for row in pool.rows) for pool in ran.values()):
        notes.append("Only the first repeat and the first answer to a question are shown.")
    for path, reason in decoder.failures.items():
        notes.append(f"The tokenizer of {path} could not be loaded here ({reason}). Its answers are shown {instead}.")
    return notes
