"""Dialogues as token ids, in exactly the prompt that fschat's vicuna_v1.1 template gives at inference."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastchat.conversation import get_conv_template
from tokenizers import Tokenizer

TEMPLATE = "vicuna_v1.1"
EOS = "</s>"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a dialogue and, for each, whether the model has to predict it."""

    ids: list[int]
    answer: list[bool]

    def __len__(self) -> int:
        return len(self.ids)


def prompt(turns: Sequence[str], answers: Sequence[str]) -> str:
    """The chat prompt of the last turn, given the answers of the turns before it."""
    conversation = get_conv_template(TEMPLATE)
    for i, turn in enumerate(turns):
        conversation.append_message(conversation.roles[0], turn)
        conversation.append_message(conversation.roles[1], answers[i] if i < len(answers) else None)
    return str(conversation.get_prompt())


def text_and_spans(turns: Sequence[str], answers: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The whole conversation and the character span of each answer, its leading space and EOS included."""
    spans = []
    for i in range(len(turns)):
        start = len(prompt(turns[: i + 1], answers[:i]))
        spans.append((start, start + len(f" {answers[i]}{EOS}")))
    return prompt(turns, answers), spans


def encode(tokenizer: Tokenizer, dialogues: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[Encoded]:
    """Encode (turns, answers) pairs."""
    texts, spans = zip(*(text_and_spans(turns, answers) for turns, answers in dialogues), strict=True)
    encoded = []
    for encoding, answer_spans in zip(tokenizer.encode_batch(list(texts)), spans, strict=True):
        answer = [any(s <= a and b <= e and a < b for s, e in answer_spans) for a, b in encoding.offsets]
        encoded.append(Encoded(encoding.ids, answer))
    return encoded


def shuffled(pool: Iterable[Encoded], tokens: int, rng: random.Random) -> list[list[Encoded]]:
    """A pool cut into batches of similar lengths, of at most `tokens` with padding, in random order."""
    cut: list[list[Encoded]] = [[]]
    for item in sorted(pool, key=len):
        if cut[-1] and (len(cut[-1]) + 1) * len(item) > tokens:
            cut.append([])
        cut[-1].append(item)
    rng.shuffle(cut)
    return cut
