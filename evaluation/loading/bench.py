"""Benches (questions of a file, fetched once by URL and hash; selected and ordered) and their prompts' ids."""

from __future__ import annotations

import hashlib
import random
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastchat.conversation import conv_templates, get_conv_template

from model.decoder import takes_chats
from model.errors import UserError
from model.files import ROOT, write_bytes

from ..records.questions import FILE_ORDER, INTERLEAVED, SHUFFLED, Question, read_questions, subtask
from .speed_bench import is_placeholder, read_speed_bench, refuse_placeholders

LAYOUTS = {"spec_bench": read_questions, "speed_bench": read_speed_bench}
REFUSE, SKIP = "refuse", "skip"
SPLITS = {"dev": 0, "held_out": 1}  # the remainder of a question's number in its subtask by 2


@dataclass(frozen=True)
class Bench:
    """A bench's name, its questions in the order asked, the file's sha256, and the order's name."""

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
    layout: str = "spec_bench",
    placeholders: str = REFUSE,
) -> Bench:
    """Load a bench, fetching it first if it is missing.

    Args:
        path: the question file, or a folder with `question.jsonl`; relative to the repository.
        url, sha256: where to fetch it, and its hash, which the user's own file must have, too, but for JSONL prepared
            from parquet. Without a hash that of what was fetched is printed.
        begin, end: slice of the file, as Spec-Bench's --question-begin and --question-end.
        per_category, spread: keep that many questions of each subtask, the first ones or evenly spread ones.
        split: dev or held_out: every other question of each subtask, from its first or second on, so that what is
            chosen on one half can be reported on the other.
        categories: keep only these subtasks.
        order: file | interleaved (one of each subtask in turn) | shuffled, or shuffled-N with another seed than 0.
        layout: of the file: spec_bench | speed_bench.
        placeholders: prompts whose text was not published: refuse | skip.

    Raises:
        UserError: missing, empty, malformed, wrong hash, no network, nothing selected, unknown order.
    """
    if split is not None and split not in SPLITS:
        raise UserError(f"bench.split={split}: must be dev, held_out or null (both)")
    file = bench_file(path, url)
    questions, digest = _read(file, url, sha256, layout, placeholders)
    subtasks = {subtask(question.category) for question in questions}
    if unknown := [name for name in categories or () if name not in subtasks]:
        raise UserError(f"bench.categories={unknown[0]}: not in {file}, which has {', '.join(sorted(subtasks))}")
    # the halves are those of the whole file, so that a slice does not change them
    numbers = dict(zip((question.question_id for question in questions), _numbers(questions), strict=True))
    part = [q for q in questions[begin:end] if split is None or numbers[q.question_id] % 2 == SPLITS[split]]
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
    refuse_placeholders(chosen, file)
    return Bench(name, ordered(chosen, order), digest, order)


def _read(
    file: Path, url: str | None, sha256: str | None, layout: str, placeholders: str
) -> tuple[tuple[Question, ...], str]:
    """Return the questions of a bench's file, which is fetched first if it is missing, and its sha256."""
    for key, value, known in (("layout", layout, LAYOUTS), ("placeholders", placeholders, (REFUSE, SKIP))):
        if value not in known:
            raise UserError(f"bench.{key}={value}: must be {' or '.join(known)}")
    prepared = str(url).endswith(".parquet") and file.suffix != ".parquet"  # by the user, from what lies there
    inside = file.resolve().is_relative_to(ROOT)  # never write outside the repository
    if url is not None and inside and not prepared and not file.exists():
        fetch(url, sha256, file)
    questions = LAYOUTS[layout](file)
    if placeholders == SKIP:
        questions = tuple(question for question in questions if not is_placeholder(question))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if sha256 is not None and not prepared and digest != sha256:
        raise UserError(
            f"{file} has sha256 {digest[:12]}..., the published one {sha256[:12]}...; delete it to fetch it again"
        )
    return questions, digest


def _numbers(questions: Sequence[Question]) -> list[int]:
    """Number the questions of each subtask from 0."""
    seen: dict[str, int] = {}
    numbers = []
    for question in questions:
        row = subtask(question.category)
        numbers.append(seen.get(row, 0))
        seen[row] = numbers[-1] + 1
    return numbers


def bench_file(path: str, url: str | None) -> Path:
    """Return a bench's question file: the one named, or question.jsonl in the folder named."""
    file = ROOT / path
    return file / "question.jsonl" if file.is_dir() or (url is None and not file.suffix) else file


def ordered(questions: Sequence[Question], order: str) -> tuple[Question, ...]:
    """Order the questions. Raises UserError for an unknown order."""
    kind, _, seed = order.partition("-")
    if order == FILE_ORDER:
        return tuple(questions)
    if order == INTERLEAVED:
        pairs = zip(_numbers(questions), questions, strict=True)
        return tuple(question for _, question in sorted(pairs, key=lambda pair: pair[0]))
    if kind == SHUFFLED and (seed.isdigit() or order == SHUFFLED):
        shuffled = list(questions)
        random.Random(int(seed or 0)).shuffle(shuffled)
        return tuple(shuffled)
    raise UserError(f"bench.order={order}: unknown; use file, interleaved, shuffled or shuffled-N (seed N)")


def fetch(url: str, sha256: str | None, file: Path) -> None:
    """Download to `file`; nothing is written unless it is complete and has the hash. Without one, print it."""
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
    if sha256 is None:
        print(f"{url}: no hash is known for it; pin what was fetched with bench.sha256={digest}", file=sys.stderr)
    elif digest != sha256:
        raise UserError(f"{url} has sha256 {digest[:12]}..., expected {sha256[:12]}...; nothing was kept")
    write_bytes(file, data)


CHAT, RAW = "chat", "raw"  # the tokenizer's own chat template; the texts alone, for a model that continues texts
VICUNA = "vicuna_v1.1"


def choose_template(name: str | None, tokenizer: Any, model: str) -> str:
    """Return the template asked for, else the model's own, Vicuna's for a Vicuna, raw. Raises UserError if unknown."""
    if name is None:
        return CHAT if takes_chats(tokenizer) else VICUNA if "vicuna" in model.lower() else RAW
    if name == CHAT and not takes_chats(tokenizer):
        raise UserError(
            "model.template=chat: this tokenizer has no chat template; name one of fschat's, e.g. vicuna_v1.1, or raw"
        )
    if name not in (CHAT, RAW) and name not in conv_templates:
        raise UserError(f"model.template={name}: fschat has no such conversation template")
    return name


def prompt_text(template: str, tokenizer: Any, turns: list[str], answers: list[str]) -> str:
    """Return the prompt for the next answer: the user's `turns` so far, the model's `answers` between them."""
    if template == CHAT:
        return str(tokenizer.apply_chat_template(_messages(turns, answers), tokenize=False, add_generation_prompt=True))
    if template == RAW:
        return "\n\n".join(message["content"] for message in _messages(turns, answers))
    conversation = get_conv_template(template)
    for i, turn in enumerate(turns):
        conversation.append_message(conversation.roles[0], turn)
        conversation.append_message(conversation.roles[1], answers[i] if i < len(answers) else None)
    return str(conversation.get_prompt())


def _messages(turns: list[str], answers: list[str]) -> list[dict[str, str]]:
    messages = []
    for i, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        messages += [{"role": "assistant", "content": answer} for answer in answers[i : i + 1]]
    return messages


def prompt_ids(template: str, tokenizer: Any, turns: list[str], answers: list[str]) -> list[int]:
    """Return the token ids of `prompt_text`. No special tokens are added to a chat template, which writes its own."""
    if template == CHAT:  # by the tokenizer itself, as mistral-common's has no text of it
        messages = _messages(turns, answers)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer(prompt_text(template, tokenizer, turns, answers)).input_ids
    return [int(i) for i in ids]


def answer_text(template: str, tokenizer: Any, tokens: list[int]) -> str:
    """Return the answer as the user reads it: without special tokens, cut at the template's stop string."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    stop = None if template in (CHAT, RAW) else get_conv_template(template).stop_str
    for mark in [stop] if isinstance(stop, str) else stop or []:
        text = text.split(mark, 1)[0]
    return str(text.strip())


def template_hash(template: str, tokenizer: Any) -> str:
    """Return the sha256 of a prompt of two turns, which changes with the template and the special tokens."""
    sample = prompt_text(template, tokenizer, ["question one", "question two"], ["answer one"])
    return hashlib.sha256(sample.encode()).hexdigest()
