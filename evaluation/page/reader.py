"""Single answers for the page's reader: the text of each token, by step, if the tokenizer is on
this machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from model.errors import UserError
from model.files import ROOT

from ..records.provenance import CONVERTED
from ..records.questions import read_questions, subtask
from ..records.rows import Row
from ..records.runs import Run
from ..statistics.metrics import lengths_by_turn
from ..statistics.pools import Pool
from .tree_svg import spelled

MOST_QUESTIONS = 24
MOST_PROMPT = 600  # characters of a question's turn that are shown


def collect(ran: dict[str, Pool]) -> dict[str, Any]:
    """Collect what the reader shows: `runs`, `questions`, `texts` (each once), `answers`; and what
    is left out.

    Questions are taken from all subtasks in turn, each with the answers of all configurations. Only
    the first repeat is shown, and the first of several choices. `failures` says by a model's path
    why its ids could not be decoded.
    """
    pools = list(ran.values())
    rows = [next(iter(pool.answers.values())) for pool in pools]
    order = _in_turn(rows)
    prompts = _prompts([pool.first for pool in pools])
    texts: dict[str | tuple[str, ...], int] = {}  # lossless methods share their texts
    failures: dict[str, str] = {}
    questions: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for key in order[:MOST_QUESTIONS]:
        answered = [(i, of_pool[key]) for i, of_pool in enumerate(rows) if key in of_pool]
        for i, row in answered:
            turns = _turns(pools[i].first, row, texts, failures)
            answers.append({"run": i, "question": len(questions), "turns": turns})
        _, row = answered[0]
        about = {"id": str(row["question_id"]), "category": str(row.get("category", "unknown"))}
        questions.append(about | {"turns": prompts.get(key, [])})
    return {
        "runs": list(ran),
        "questions": questions,
        "answers": answers,
        "texts": [{"text": text} if isinstance(text, str) else {"pieces": text} for text in texts],
        "total": len(order),
        "first_only": any(
            len(p.repeats) > 1 or any(len(row["choices"]) > 1 for row in p.rows) for p in pools
        ),
        "failures": failures,
    }


def _in_turn(rows: Iterable[dict[str, Row]]) -> list[str]:
    """Order the questions with one of each subtask in turn, so that a part shows every subtask."""
    answered = (pair for of_pool in rows for pair in of_pool.items())
    groups = pd.Series({key: subtask(str(row.get("category", "unknown"))) for key, row in answered})
    return list(groups.groupby(groups).cumcount().sort_values(kind="stable").index)


def _turns(
    run: Run, row: Row, texts: dict[str | tuple[str, ...], int], failures: dict[str, str]
) -> list[Any]:
    """Return each turn of the first answer: its text, and its steps' lengths, paths and nodes where
    recorded.
    """
    choice = row["choices"][0]
    lengths = lengths_by_turn(choice)
    ids, paths, nodes = (
        choice.get(key) or [] for key in ("output_ids", "step_paths", "step_nodes")
    )
    turns = []
    for i, text in enumerate(choice["turns"]):
        decoded = _decoded(run, ids[i], failures) if i < len(ids) and ids[i] else None
        turn = {
            "text": texts.setdefault(decoded or text, len(texts)),
            "lengths": lengths[i] if lengths else [],
        }
        turn |= {"paths": [spelled(tuple(path)) for path in paths[i]]} if i < len(paths) else {}
        turns.append(turn | ({"nodes": nodes[i]} if i < len(nodes) else {}))
    return turns


def _decoded(run: Run, ids: list[int], failures: dict[str, str]) -> tuple[str, ...] | None:
    """Decode with the run's tokenizer, from local files only; None, and why in `failures`, if there
    is none.
    """
    model = run.settings["model"] | run.identity.asked.get("model", {})
    path = str(model.get("path"))
    sha256 = str((run.metadata.get("converted_from") or {}).get("sha256", ""))
    if path not in failures:
        try:
            folders = (
                [path] if not sha256 else sorted(map(str, CONVERTED.glob(f"*-{sha256[:16]}-*")))
            )
            if not folders:
                raise FileNotFoundError(
                    f"its GGUF file of sha256 {sha256[:12]} was not converted here"
                )
            return pieces(load(folders[-1], model.get("revision")), tuple(ids))
        except (
            Exception
        ) as error:  # a foreign tokenizer may raise anything; the page shows plain text, and why
            failures[path] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


@lru_cache(maxsize=4)
def load(path: str, revision: str | None = None) -> Tokenizer:
    """Load a model's tokenizer from local files only and without its code."""
    folder = next((p for p in (Path(path).expanduser(), ROOT / path) if p.is_dir()), None)
    if folder is not None and (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    if folder is None and path.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"no folder {path}")
    # takes seconds to import: only where nothing else will do
    from transformers import (
        AutoTokenizer,
    )

    where: dict[str, Any] = {
        "revision": revision,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
        str(folder or path), **where
    ).backend_tokenizer
    return tokenizer


@lru_cache(maxsize=1024)
def pieces(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[str, ...]:
    """Return the text that each id adds, special tokens included; the last id of a character adds
    all of it.

    If ids are no text, such as bytes that begin no character, the whole answer is one piece.
    """
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    stream = DecodeStream(skip_special_tokens=False)
    try:
        parts = [stream.step(tokenizer, token) or "" for token in ids]
    except Exception:  # DecodeStream raises no other class
        return (whole,)
    parts[-1] += whole[len("".join(parts)) :]  # a character that the limit cut
    return tuple(parts) if "".join(parts) == whole else (whole,)


def _prompts(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Read the questions' own turns, by key, from the bench's file if it has not changed since the
    run.
    """
    prompts: dict[str, list[str]] = {}
    benches = [
        (str(run.identity.asked.get("bench", {}).get("path")), run.settings["bench"].get("sha256"))
        for run in runs
    ]
    for path, digest in dict.fromkeys(benches):
        file = ROOT / path / "question.jsonl" if (ROOT / path).is_dir() else ROOT / path
        try:
            if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                continue
            for question in read_questions(file):
                turns = [
                    turn[:MOST_PROMPT] + " …" * (len(turn) > MOST_PROMPT) for turn in question.turns
                ]
                for key in (question.key, str(question.question_id)):
                    prompts.setdefault(key, turns)
        except (OSError, UserError):
            # the page shows the question's number and category, as for other people's files
            continue
    return prompts
