"""Answers of any engine from a JSONL file as token ids, and a model's choices along them.

A line is an answer in Spec-Bench's format, a line of `token-recycling generate --jsonl`, or has
`prompt_token_ids` and `token_ids`, named as by vLLM. Text without ids is tokenised with its prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.engine import Draft, Target, Tree
from model.errors import UserError, one_line
from model.prompts import CHAT

from ..records.rows import Question, Row, fault, ids_sha256, misfit, read_rows
from .bench import answer_text, prompt_ids, prompt_text
from .models import LoadedModel

# this project's reasons to stop, as vLLM names them
_FINISH = {"eos": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True)
class EngineAnswer:
    name: str  # the question's name, as printed
    prompt: list[int]
    ids: list[int]  # the answer's, up to its first EOS
    behind: int  # number of tokens that the file has after that EOS
    remade: bool  # True if the ids were made from the answer's text
    # "stop" (the engine says that EOS ended it), "length", another word of the file's, or empty
    finish: str


def read_requests(path: Path, questions: Mapping[Any, Question]) -> list[tuple[str, Row]]:
    """Return file and line of each answer, and its prompt and answer named as in schema.yaml.

    `questions` has the bench's by id. Raises UserError if a line cannot be audited.
    """
    requests: list[tuple[str, Row]] = []
    for where, row in read_rows(path, "answer file"):
        of_bench = isinstance(row, dict) and "question_id" in row
        if isinstance(row, dict) and "ids" in row:  # of `token-recycling generate --jsonl`
            row |= {"token_ids": row["ids"], "finish_reason": _FINISH.get(str(row.get("stop")))}
        why = fault(row) if of_bench else misfit(row, "request")
        if not why and row.get("temperature"):
            why = f"temperature {row['temperature']}: an audit is of greedy answers"
        try:
            if why:
                raise UserError(why)
            read = _turns(row, questions) if of_bench else [{"id": where.rpartition(":")[2]} | row]
            requests += ((where, request) for request in read)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    if not requests:
        raise UserError(f"answer file {path}: holds no answer")
    return requests


def _turns(row: Row, questions: Mapping[Any, Question]) -> Iterator[Row]:
    number = row["question_id"]
    if number not in questions:
        raise UserError(f"question {number}: its text is not known; name its bench: --bench NAME")
    question = questions[number]
    if row.get("question_sha256") not in (None, question.sha256):
        raise UserError(f"question {number} has another text in this bench")
    for index, choice in enumerate(row["choices"]):
        texts = choice["turns"]
        answers = choice.get("output_ids") or texts
        stops = choice.get("stop") or [""] * len(answers)
        hashes = choice.get("prompt_sha256") or [None] * len(answers)
        if {*map(len, (answers, stops, hashes, texts))} != {len(question.turns)}:
            raise UserError(
                f"question {number} has {len(question.turns)} turns,"
                " and not each has its answer and stop"
            )

        messages = list[Row]()
        turns = zip(question.turns, answers, stops, texts, hashes, strict=True)
        for turn, (user_text, answer, stop, text, sha256) in enumerate(turns, start=1):
            messages = [*messages, {"role": "user", "content": user_text}]
            if answer or stop != "context":  # else the prompt had no room for an answer
                yield {
                    "id": f"{number}, turn {turn}" + f", answer {index + 1}" * (index > 0),
                    "messages": messages,
                    "text" if isinstance(answer, str) else "token_ids": answer,
                    # without ids, no end is judged
                    "finish_reason": _FINISH.get(stop, stop) if answer else "length",
                    "prompt_sha256": sha256,
                }
            messages = [*messages, {"role": "assistant", "content": text or answer}]


def tokenised(
    where: str, request: Row, loaded: LoadedModel, date: str | None = None
) -> EngineAnswer:
    """Return an answer's token ids; `date` is as `prompt_ids` takes it.

    Raises:
        UserError: the template no longer gives the prompt that was answered, ids are outside the
            vocabulary, or there are more tokens than max_tokens or the context allow.
    """
    prompt = request.get("prompt_token_ids")
    space = ""
    if prompt is None:
        prompt, space = _prompt(request, loaded, date)
        if request["prompt_sha256"] not in (None, ids_sha256(prompt)):
            raise UserError(
                f"{where}: its prompt, made again, is another one: has the template, or the date in"
                " it, changed? An answer file keeps its date next to its metadata.json"
            )

    ids = request.get("token_ids")
    remade = ids is None
    cut = remade and "\ufffd" in request["text"]  # ids would not be those of the text
    if ids is None:
        before = loaded.tokenizer.decode(prompt)
        ids = [] if cut else continued(loaded.tokenizer, before, space + request["text"])

    limit = request.get("max_tokens")
    if limit is not None and len(ids) > limit:
        raise UserError(f"{where}: {len(ids)} tokens, and max_tokens is {limit}")
    end = next((count for count, token in enumerate(ids, start=1) if token in loaded.eos), len(ids))
    vocabulary = loaded.target.vocab_size
    if not prompt or not all(0 <= token < vocabulary for token in (*prompt, *ids)):
        raise UserError(
            f"{where}: its prompt is empty, or ids are outside the vocabulary of {vocabulary}"
        )
    length = len(prompt) + end
    context = loaded.target.context
    if length > context:
        raise UserError(
            f"{where}: {length} tokens, and the context has {context}; say model.context=N"
        )

    finish = request.get("finish_reason") or ("length" if end == limit else "")
    if finish == "stop" and request.get("stop_reason") is not None:
        finish = "a stop text, perhaps"
    if cut:
        finish = "cut inside a character"
    name = one_line(str(request["id"]))[:40]
    return EngineAnswer(name, prompt, list(ids[:end]), len(ids) - end, remade, str(finish))


def continued(tokenizer: Any, before: str, answer: str) -> list[int]:
    """Return the ids of an answer's text, tokenised together with the text before it.

    Special words are plain text, as engines leave special tokens out. If the answer would merge
    with the last token before it, it is tokenised behind a line break.
    """
    plain = partial(tokenizer, add_special_tokens=False, split_special_tokens=True)
    head = list(plain(before).input_ids)
    ids = list(plain(before + answer).input_ids)
    if ids[: len(head)] != head:
        return continued(tokenizer, "\n" if len(before) > 1 else "", answer)
    return ids[len(head) :]


def _prompt(request: Row, loaded: LoadedModel, date: str | None) -> tuple[list[int], str]:
    """Return a prompt's ids, and the text between it and the answer's text."""
    template = loaded.template
    chat = list(request["messages"])
    for i, turn in enumerate(chat):
        if isinstance(turn["content"], list):
            text = answer_text(template, loaded.tokenizer, turn["content"])
            chat[i] = turn | {"content": text}
    ids = prompt_ids(template, loaded.tokenizer, chat, date)
    answer = request.get("text")
    if template == CHAT or not answer:
        return ids, ""
    return ids, space_between(prompt_text(template, chat), answer)


def space_between(before: str, answer: str) -> str:
    """Return the space of fschat's templates between prompt and answer, if neither has it."""
    return "" if before[-1].isspace() or answer[0].isspace() else " "


@dataclass
class Forced:
    """A model's logits at each of an answer's n positions, and at the position after it."""

    choices: list[int] = field(default_factory=list)  # the model's arg-max (n + 1)
    # largest logit minus the logit of the answer's token (n), then minus that of the likeliest EOS
    # (1)
    gaps: list[float] = field(default_factory=list)
    # largest logit minus the second largest (n + 1)
    margins: list[float] = field(default_factory=list)


def force(
    target: Target,
    prompt: list[int],
    ids: list[int],
    eos: Collection[int] = (),
    *,
    by_steps: bool = False,
) -> Forced:
    """Read the model's logits along an answer, at most `LOGITS_BYTES` at once.

    Args:
        by_steps: forward one token at a time, as engines decode.
    """
    forced = Forced()
    ends = sorted(eos)

    def read(start: int, logits: Tensor) -> None:  # (m, V)
        first = len(forced.choices)
        logits = logits.float()
        best = logits.topk(2).values  # (m, 2)
        tokens = torch.tensor([*ids, 0][first : first + len(logits)], device=logits.device)
        picked = logits.gather(1, tokens[:, None])[:, 0]
        if first + len(logits) > len(ids):
            picked[-1] = logits[-1, ends].max() if ends else float("-inf")
        forced.choices.extend(logits.argmax(-1).tolist())
        forced.gaps.extend((best[:, 0] - picked).tolist())
        forced.margins.extend((best[:, 0] - best[:, 1]).tolist())

    text = [*prompt, *ids]
    root = Tree.chain(0).on(target.device)
    with target.turns, target.cache(1, tokens=len(text) + 1) as cache:
        if not by_steps:
            target.prefill(cache, [*text, 0], rows=len(ids) + 1, read=read)
            return forced
        target.prefill(cache, prompt)
        for token in text[len(prompt) - 1 :]:
            draft = Draft(root, torch.tensor([token], device=target.device))
            read(0, target.forward(cache, draft).logits)
            cache.commit([0])

    return forced


def noise(one: Forced, other: Forced) -> float:
    """Return the largest change, at any position, of the gap between the two largest logits."""
    pairs = zip(one.choices, other.choices, one.margins, other.margins, strict=True)
    return max(abs(a - b) if choice == peer else a + b for choice, peer, a, b in pairs)
