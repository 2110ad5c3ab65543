"""Benches (a file of questions, fetched once by URL and hash; a part of it, in an order) and their prompts' ids."""

from __future__ import annotations

import hashlib
import random
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastchat.conversation import conv_templates, get_conv_template

from model.errors import UserError
from model.files import ROOT, write_bytes

from ..records.questions import FILE_ORDER, INTERLEAVED, SHUFFLED, Question, read_questions, subtask

SPLITS = {"dev": 0, "held_out": 1}  # which of each two questions of a subtask


@dataclass(frozen=True)
class Bench:
    """A bench's name, its questions in the order they are asked, the file's sha256, and which order that is."""

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
    split: str | None = None,
    categories: Sequence[str] | None = None,
    order: str = FILE_ORDER,
) -> Bench:
    """Load a bench, fetching it first if it is not there.

    Args:
        path: the question file, or a folder that holds `question.jsonl`; relative to the repository.
        url, sha256: where to fetch it and what it must hash to. A file that the user put there is checked, too.
        begin, end: slice of the file, as Spec-Bench's --question-begin and --question-end.
        per_category: only so many questions of each subtask: the first ones, or
        spread: those that are evenly spread over its part of the file.
        split: dev or held_out: every other question of each subtask, from its first or second on, so that what is
            chosen on one half can be reported on the other.
        categories: only these subtasks.
        order: file | interleaved (one of each subtask in turn) | shuffled, or shuffled-N with another seed than 0.

    Raises:
        UserError: missing, empty, malformed, wrong hash, no network, nothing selected, unknown order.
    """
    if split is not None and split not in SPLITS:
        raise UserError(f"bench.split={split}: must be dev, held_out or null (both)")
    file = bench_file(path, url)
    if not file.exists() and url is not None and file.resolve().is_relative_to(ROOT):  # never to a place of the user's
        fetch(url, sha256 or "", file)
    questions = read_questions(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if sha256 is not None and digest != sha256:
        raise UserError(
            f"{file} has sha256 {digest[:12]}..., the published one {sha256[:12]}...; delete it to fetch it again"
        )
    # halves are those of the whole file, so that a slice of it splits no otherwise
    places = dict(zip((question.question_id for question in questions), _places(questions), strict=True))
    part = [
        question
        for question in questions[begin:end]
        if split is None or places[question.question_id] % 2 == SPLITS[split]
    ]
    groups: dict[str, list[Question]] = {}
    for question in part:
        groups.setdefault(subtask(question.category), []).append(question)
    kept: set[Any] = set()  # ids
    for row, members in groups.items():
        if categories is None or row in categories:
            most = len(members) if per_category is None else min(per_category, len(members))
            kept |= {members[i * len(members) // most if spread else i].question_id for i in range(most)}
    chosen = [question for question in part if question.question_id in kept]
    if not chosen:
        raise UserError(f"bench {name}: no question is left of {len(questions)} after the selection")
    return Bench(name, ordered(chosen, order), digest, order)


def _places(questions: Sequence[Question]) -> list[int]:
    """Of each question: how many of its subtask come before it."""
    seen: dict[str, int] = {}
    places = []
    for question in questions:
        row = subtask(question.category)
        places.append(seen.get(row, 0))
        seen[row] = places[-1] + 1
    return places


def bench_file(path: str, url: str | None) -> Path:
    """Where a bench's questions lie, or will when they are fetched: the file named, or the one in the folder named."""
    file = ROOT / path
    return file / "question.jsonl" if file.is_dir() or (url is None and not file.suffix) else file


def ordered(questions: Sequence[Question], order: str) -> tuple[Question, ...]:
    """The questions in that order. Raises UserError if there is no such order."""
    kind, _, seed = order.partition("-")
    if order == FILE_ORDER:
        return tuple(questions)
    if order == INTERLEAVED:
        pairs = zip(_places(questions), questions, strict=True)
        return tuple(question for _, question in sorted(pairs, key=lambda pair: pair[0]))
    if kind == SHUFFLED and (seed.isdigit() or order == SHUFFLED):
        shuffled = list(questions)
        random.Random(int(seed or 0)).shuffle(shuffled)
        return tuple(shuffled)
    raise UserError(f"bench.order={order}: unknown; use file, interleaved, shuffled or shuffled-N (seed N)")


def fetch(url: str, sha256: str, file: Path) -> None:
    """Download to `file`, whole and of the right hash, or not at all."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            data = response.read()
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"cannot fetch {url} ({reason}); download it elsewhere and put it at {file}, "
            "or name a folder with bench.path="
        ) from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise UserError(f"{url} has sha256 {digest[:12]}..., expected {sha256[:12]}...; nothing was kept")
    write_bytes(file, data)


OWN = "chat"  # the name of the tokenizer's own chat template
DEFAULT = "vicuna_v1.1"


def choose_template(name: str | None, tokenizer: Any) -> str:
    """The template to use: the one asked for, else the model's own, else Vicuna's. Raises UserError if unknown."""
    has_own = bool(getattr(tokenizer, "chat_template", None))
    if name is None:
        return OWN if has_own else DEFAULT
    if name == OWN and not has_own:
        raise UserError(
            "model.template=chat: this tokenizer has no chat template; name one of fschat's, e.g. vicuna_v1.1"
        )
    if name != OWN and name not in conv_templates:
        raise UserError(f"model.template={name}: fschat has no such conversation template")
    return name


def prompt_text(template: str, tokenizer: Any, turns: list[str], answers: list[str]) -> str:
    """The prompt before answer number len(answers): `turns` of the user so far, `answers` of the model between them."""
    if template == OWN:
        messages = []
        for i, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if i < len(answers):
                messages.append({"role": "assistant", "content": answers[i]})
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    conversation = get_conv_template(template)
    for i, turn in enumerate(turns):
        conversation.append_message(conversation.roles[0], turn)
        conversation.append_message(conversation.roles[1], answers[i] if i < len(answers) else None)
    return str(conversation.get_prompt())


def prompt_ids(template: str, tokenizer: Any, turns: list[str], answers: list[str]) -> list[int]:
    """Token ids of `prompt_text`; a chat template writes its own special tokens, so none is added then."""
    text = prompt_text(template, tokenizer, turns, answers)
    ids = tokenizer(text, add_special_tokens=template != OWN).input_ids
    return [int(i) for i in ids]


def answer_text(template: str, tokenizer: Any, tokens: list[int]) -> str:
    """What the user reads: special tokens left out, cut at the template's stop string."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    stop = None if template == OWN else get_conv_template(template).stop_str
    for mark in [stop] if isinstance(stop, str) else stop or []:
        text = text.split(mark, 1)[0]
    return str(text.strip())


def template_hash(template: str, tokenizer: Any) -> str:
    """sha256 of a prompt of two turns: changes when the template or the tokenizer's specials do."""
    sample = prompt_text(template, tokenizer, ["question one", "question two"], ["answer one"])
    return hashlib.sha256(sample.encode()).hexdigest()
