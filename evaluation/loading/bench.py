"""Load benches: fetch a file, select and order its questions, make prompts of them.

SPEED-Bench's rows (NVIDIA, arXiv 2604.09557) are read as published, or as NVIDIA's prepare.py
writes them. Prompts that licences keep out are placeholders until prepare.py fetches them.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from fastchat.conversation import conv_templates, get_conv_template

from model import prompts
from model.errors import UserError, one_line
from model.files import ROOT, located, write_bytes

from ..records.rows import (
    FILE_ORDER,
    INTERLEAVED,
    SHUFFLED,
    Question,
    checked_questions,
    read_rows,
    subtask,
)

SPLITS = ("dev", "held_out")  # the even and odd questions of each subtask, counted from 0
# how chat templates ask transformers for the date
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
PREPARE = (
    "https://raw.githubusercontent.com/NVIDIA-NeMo/Skills/5ac8609a56ac941540b10c92e68d556e6343cd4c/"
    "nemo_skills/dataset/speed-bench/prepare.py"
)


@dataclass(frozen=True)
class Bench:
    name: str
    questions: tuple[Question, ...]
    sha256: str
    order: str = FILE_ORDER


def load_bench(
    name: str,
    path: str,
    *,
    url: str | None = None,
    sha256: str | None = None,
    begin: int | None = None,
    end: int | None = None,
    per_category: int | None = None,
    spread: bool = False,
    split: Literal["dev", "held_out"] | None = None,
    categories: Sequence[str] | None = None,
    order: str = FILE_ORDER,
    layout: Literal["spec_bench", "speed_bench"] = "spec_bench",
    placeholders: Literal["refuse", "skip"] = "refuse",
) -> Bench:
    """Load a bench, fetching it first if it is missing.

    Args:
        path: the question file, or a folder with `question.jsonl`; relative to the repository.
        url, sha256: where to fetch the file, and its hash, also of a file that is there, unless it
            is JSONL prepared from parquet.
        begin, end: slice of the file, as Spec-Bench's --question-begin and --question-end.
        per_category, spread: keep that many questions of each subtask, the first or evenly spread.
        split: every other question of each subtask, from the first (dev) or second (held_out) on.
        categories: keep only these subtasks.
        order: file | interleaved (one of each subtask in turn) | shuffled, or shuffled-N (seed N).
        placeholders: prompts whose text was not published.

    Raises UserError if the file is missing or wrong, or nothing is selected.
    """
    file = located(path)
    if file.is_dir() or (url is None and not file.suffix):
        file /= "question.jsonl"
    digest = _fetch(file, url, sha256)
    rows = read_rows(file) if layout == "spec_bench" else _speed_bench_rows(file)
    questions = [*checked_questions(rows, file)]
    if placeholders == "skip":
        questions = [question for question in questions if not _is_placeholder(question)]

    subtasks = {subtask(question.category) for question in questions}
    if unknown := [name for name in categories or () if name not in subtasks]:
        raise UserError(
            f"bench.categories={unknown[0]}: not in {file}, which has {', '.join(sorted(subtasks))}"
        )

    # numbered before the slice, which so keeps the file's halves
    positions = numbers(question.category for question in questions)
    numbered = list(zip(questions, positions, strict=True))[begin:end]
    part = [question for question, n in numbered if split in (None, SPLITS[n % 2])]

    selection = set[Question]()
    for row in subtasks if categories is None else categories:
        members = [question for question in part if subtask(question.category) == row]
        most = len(members) if per_category is None else min(per_category, len(members))
        selection |= {members[i * len(members) // most if spread else i] for i in range(most)}

    selected = [question for question in part if question in selection]
    if not selected:
        raise UserError(
            f"bench {name}: no question is left of {len(questions)} after the selection"
        )

    missing = sum(map(_is_placeholder, selected))
    if missing:
        raise UserError(
            f"{file}: {missing} prompts are placeholders, as their licences keep the text out; fill"
            f" them by {PREPARE} and name its file with bench.path=, or leave them out with"
            " bench.placeholders=skip"
        )
    return Bench(name, ordered(selected, order), digest, order)


def numbers(categories: Iterable[str]) -> list[int]:
    """Number the questions of each subtask from 0."""
    counts = Counter[str]()
    numbered = []
    for name in map(subtask, categories):
        numbered.append(counts[name])
        counts[name] += 1
    return numbered


def ordered(questions: Sequence[Question], order: str) -> tuple[Question, ...]:
    """Order the questions. Raises UserError for an unknown order."""
    kind, _, seed = order.partition("-")
    if order == FILE_ORDER:
        return tuple(questions)
    if order == INTERLEAVED:
        places = numbers(question.category for question in questions)
        turns = sorted(range(len(questions)), key=places.__getitem__)
        return tuple(questions[i] for i in turns)
    if kind == SHUFFLED and (seed.isdecimal() or order == SHUFFLED):
        shuffled = list(questions)
        random.Random(int(seed or 0)).shuffle(shuffled)
        return tuple(shuffled)

    raise UserError(
        f"bench.order={order}: unknown; use file, interleaved, shuffled or shuffled-N (seed N)"
    )


def _fetch(file: Path, url: str | None, sha256: str | None) -> str:
    """Download a missing file, completely and with its hash or not at all; return its sha256."""
    if str(url).endswith(".parquet") and file.suffix != ".parquet":  # prepared by the user
        url = sha256 = None
    # nothing is written outside this folder
    is_local = file.exists() or not file.resolve().is_relative_to(ROOT)
    if url is None or is_local:
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        if digest and sha256 not in (None, digest):
            why = f"has sha256 {digest[:12]}..., the published one {str(sha256)[:12]}..."
            raise UserError(f"{file} {why}; delete it to fetch it again")
        return digest

    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            data = response.read()
    except OSError as error:  # URLError and TimeoutError, too
        raise UserError(
            f"cannot fetch {url} ({one_line(error)}); download it elsewhere and put it at {file},"
            " or name a folder with bench.path="
        ) from None

    digest = hashlib.sha256(data).hexdigest()
    if sha256 is None:
        print(
            f"{url}: no hash is known for it; pin what was fetched with bench.sha256={digest}",
            file=sys.stderr,
        )
    elif digest != sha256:
        raise UserError(
            f"{url} has sha256 {digest[:12]}..., expected {sha256[:12]}...; nothing was kept"
        )

    write_bytes(file, data)
    return digest


def _is_placeholder(question: Question) -> bool:
    return any(PLACEHOLDER in turn for turn in question.turns)


def _speed_bench_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield SPEED-Bench's rows in Spec-Bench's layout; `checked_questions` reports wrong ones."""
    for where, row in _parquet_rows(path) if path.suffix == ".parquet" else read_rows(path):
        if isinstance(row, dict) and isinstance(row.get("messages"), list):
            row["turns"] = [message.get("content") for message in row["messages"]]
        if isinstance(row, dict) and "category" in row:  # apart from Spec-Bench's of this name
            row["category"] = f"speed_{row['category']}"
        yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise UserError(f"question file {path} does not exist")
    try:
        frame = pd.read_parquet(path)
    except Exception as error:  # pandas and pyarrow raise many kinds, also if pyarrow is missing
        raise UserError(f"question file {path} cannot be read ({one_line(error)[:300]})") from None

    for number, row in enumerate(json.loads(frame.to_json(orient="records")), start=1):
        yield f"{path}: row {number}", row


def choose_template(name: str | None, tokenizer: Any, model: str) -> str:
    """Return the template asked for, else the model's own. Raises UserError if there is none."""
    if name is None:
        return prompts.default_template(tokenizer, model)
    if name == prompts.CHAT and not prompts.takes_chats(tokenizer):
        raise UserError(
            "model.template=chat: this tokenizer has no chat template;"
            " name one of fschat's, e.g. vicuna_v1.1, or raw"
        )
    if name not in (prompts.CHAT, prompts.RAW) and name not in conv_templates:
        raise UserError(f"model.template={name}: fschat has no such conversation template")
    return name


def prompt_text(template: str, turns: prompts.Turns) -> str:
    """Return the text of a chat's turns as `chat_text` does, also by fschat's templates."""
    if template in (prompts.RAW, prompts.VICUNA):
        return prompts.chat_text(template, turns)
    conversation = get_conv_template(template)
    contents: list[str | None] = [*prompts.alternating(turns), *[None] * (len(turns) % 2)]
    for i, content in enumerate(contents):
        conversation.append_message(conversation.roles[i % 2], content)
    return str(conversation.get_prompt())


def prompt_ids(
    template: str, tokenizer: Any, chat: prompts.Turns, date: str | None = None
) -> list[int]:
    """Return the token ids of the prompt for a chat's next answer.

    Args:
        date: what the tokenizer's template takes for today; None: today.
    """
    if template != prompts.CHAT:
        return prompts.text_ids(tokenizer, prompt_text(template, chat))
    # by the tokenizer itself, as mistral-common's gives no text
    options = {"chat_template": dated(tokenizer.get_chat_template(), date)} if date else {}
    return prompts.chat_ids(tokenizer, chat, **options)


def dated(template: str, date: str) -> str:
    day = datetime.fromisoformat(date)
    return TODAY.sub(lambda call: json.dumps(day.strftime(call[2])), template)


def chat_of(turns: Sequence[str], answers: Sequence[str]) -> list[dict[str, str]]:
    """Return a chat of turns and the answers to them; the last answer may be missing."""
    texts = [text for text in chain(*zip_longest(turns, answers)) if text is not None]
    return [{"role": prompts.ROLES[i % 2], "content": text} for i, text in enumerate(texts)]


def answer_text(template: str, tokenizer: Any, tokens: list[int]) -> str:
    """Return the answer without special tokens, cut at the template's stop string."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    stop = None if template in (prompts.CHAT, prompts.RAW) else get_conv_template(template).stop_str
    for mark in [stop] if isinstance(stop, str) else stop or []:
        text = text.partition(mark)[0]
    return str(text.strip())
