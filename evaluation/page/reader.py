"""Single answers for the page's reader: the text of each token, by step.

Tokens are told apart only if the tokenizer is on this machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import pandas as pd
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from model.errors import one_line
from model.files import located

from ..records.provenance import CONVERTED, sha256_of
from ..records.rows import Row, read_questions, subtask
from ..records.runs import Run
from ..statistics.metrics import lengths_by_turn
from ..statistics.pools import Pool
from .tree_svg import spelled

MOST_QUESTIONS = 24
MOST_PROMPT = 600  # characters of a question's turn that are shown


def collect(pools: Sequence[Pool]) -> dict[str, Any]:
    """Collect what the reader shows: `runs`, `questions`, `texts` (each once), `answers`.

    Questions are taken from all subtasks in turn, each with the answers of all configurations. Only
    the first repeat is shown, and the first of several choices; `total` and `first_only` say what
    is left out. `failures` says by a model's path why its ids could not be decoded.
    """
    order = _in_turn(pools)
    prompts = _prompts([pool.first for pool in pools])

    texts: dict[str | tuple[str, ...], int] = {}  # lossless methods share their texts
    failures: dict[str, str] = {}
    questions: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for place, key in enumerate(order[:MOST_QUESTIONS]):
        asked = [pool for pool in pools if key in pool.first_answers]
        row = asked[0].first_answers[key]
        questions.append(
            {
                "id": str(row["question_id"]),
                "category": str(row.get("category", "unknown")),
                "turns": prompts.get(key, []),
            }
        )
        for pool in asked:
            turns = _turns(pool.first, pool.first_answers[key], texts, failures)
            answers.append(
                {
                    "run": pools.index(pool),
                    "question": place,
                    "turns": turns,
                }
            )

    return {
        "runs": [pool.title for pool in pools],
        "questions": questions,
        "answers": answers,
        "texts": [{"text": text} if isinstance(text, str) else {"pieces": text} for text in texts],
        "total": len(order),
        "first_only": any(map(_has_several, pools)),
        "failures": failures,
    }


def _has_several(pool: Pool) -> bool:
    """Return whether questions were answered several times, in repeats or choices."""
    if len(pool.repeats) > 1:
        return True
    return any(len(row["choices"]) > 1 for row in pool.rows)


def _in_turn(pools: Iterable[Pool]) -> list[str]:
    """Order the questions with one of each subtask in turn, so that a part shows every subtask."""
    subtasks: dict[str, str] = {}
    for pool in pools:
        for key, row in pool.first_answers.items():
            subtasks[key] = subtask(str(row.get("category", "unknown")))
    groups = pd.Series(subtasks)
    return list(groups.groupby(groups).cumcount().sort_values(kind="stable").index)


def _turns(
    run: Run,
    row: Row,
    texts: dict[str | tuple[str, ...], int],
    failures: dict[str, str],
) -> list[dict[str, Any]]:
    """Return each turn of the first answer: its text, and its steps where they are recorded.

    Steps have lengths, paths and nodes. `texts` and `failures` are added to.
    """
    choice = row["choices"][0]
    lengths = lengths_by_turn(choice)
    turns = []
    for i, text in enumerate(choice["turns"]):
        ids = choice["output_ids"][i] if choice.get("output_ids") else []
        decoded = _decoded(run, ids, failures) if ids else None
        turn: dict[str, Any] = {
            "text": texts.setdefault(decoded or text, len(texts)),
            "lengths": lengths[i] if lengths else [],
        }
        if choice.get("step_paths"):
            paths = map(tuple, choice["step_paths"][i])
            turn["paths"] = list(map(spelled, paths))
        if choice.get("step_nodes"):
            turn["nodes"] = choice["step_nodes"][i]
        turns.append(turn)
    return turns


def _decoded(run: Run, ids: list[int], failures: dict[str, str]) -> tuple[str, ...] | None:
    """Decode with the run's tokenizer, from local files only.

    Without one, return None and add to `failures` why.
    """
    model = run.settings["model"] | run.config.get("model", {})
    path = str(model.get("path"))
    if path in failures:
        return None
    try:
        revision = run.files.get("commit", model.get("revision"))
        tokenizer = load(_tokenizer_path(run, path), revision)
        return pieces(tokenizer, tuple(ids))
    except Exception as error:
        # a foreign tokenizer may raise anything; the page shows plain text, and why
        failures[path] = one_line(f"{type(error).__name__}: {error}")[:200]
        return None


def _tokenizer_path(run: Run, path: str) -> str:
    """Return where the tokenizer is: of a GGUF file, in the folder that it was converted to."""
    source = run.metadata.get("converted_from") or {}
    sha256 = str(source.get("sha256", ""))
    if not sha256:
        return path
    folders = sorted(map(str, CONVERTED.glob(f"*-{sha256[:16]}-*")))
    if not folders:
        raise FileNotFoundError(f"its GGUF file of sha256 {sha256[:12]} was not converted here")
    return folders[-1]


@lru_cache(maxsize=4)
def load(path: str, revision: str | None = None) -> Tokenizer:
    """Load a model's tokenizer from local files only and without its code."""
    file = located(path) / "tokenizer.json"
    if file.is_file():
        return Tokenizer.from_file(str(file))

    # takes seconds to import: only where nothing else will do
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(
        path,
        revision=revision,
        local_files_only=True,
        trust_remote_code=False,
    )
    tokenizer: Tokenizer = loaded.backend_tokenizer
    return tokenizer


@lru_cache(maxsize=1024)
def pieces(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[str, ...]:
    """Return the text that each id adds, special tokens included.

    The last id of a character adds all of it. If ids are no text, such as bytes that begin no
    character, the whole answer is one piece.
    """
    text = tokenizer.decode(ids, skip_special_tokens=False)
    stream = DecodeStream(skip_special_tokens=False)
    try:
        parts = [stream.step(tokenizer, token) or "" for token in ids]
    except Exception:  # DecodeStream raises no other class
        return (text,)

    length = len("".join(parts))
    parts[-1] += text[length:]  # a character that the limit cut
    return tuple(parts) if "".join(parts) == text else (text,)


def _prompts(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Read the questions' own turns, by key, from the bench's file.

    A file that has changed since the run is left out.
    """
    prompts: dict[str, list[str]] = {}
    read = set[tuple[str, str]]()
    for run in runs:
        path = str(run.config.get("bench", {}).get("path"))
        digest = str(run.settings["bench"].get("sha256"))
        if (path, digest) in read:
            continue
        read.add((path, digest))

        file = located(path)
        if file.is_dir():
            file /= "question.jsonl"
        if not file.is_file() or sha256_of(file) != digest:
            continue  # the page shows the question's number and category
        for question in read_questions(file):
            turns = [_shortened(turn) for turn in question.turns]
            prompts.setdefault(question.key, turns)
            prompts.setdefault(str(question.question_id), turns)
    return prompts


def _shortened(turn: str) -> str:
    if len(turn) <= MOST_PROMPT:
        return turn
    return f"{turn[:MOST_PROMPT]} …"
