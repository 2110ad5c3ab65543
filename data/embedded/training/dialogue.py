"""A conversation of the synthetic world, and its token ids in fschat's vicuna_v1.1 prompt, as at inference."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
from fastchat.conversation import get_conv_template
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

TEMPLATE = "vicuna_v1.1"
EOS = "</s>"
AT_ONCE = 64  # dialogues that are encoded together

WORLD: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "world.yaml").read_text(encoding="utf-8"))
FIRST_NAMES: list[str] = WORLD["first_names"]
LAST_NAMES: list[str] = WORLD["last_names"]
CITIES: list[str] = WORLD["cities"]
DAYS: list[str] = WORLD["days"]


def prompt(turns: Sequence[str], answers: Sequence[str]) -> str:
    """The chat prompt of the last turn, given the answers of the turns before it."""
    conversation = get_conv_template(TEMPLATE)
    for i, turn in enumerate(turns):
        conversation.append_message(conversation.roles[0], turn)
        conversation.append_message(conversation.roles[1], answers[i] if i < len(answers) else None)
    return str(conversation.get_prompt())


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A question of the bench with its reference answers, one answer a turn."""

    category: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.turns) != len(self.answers):
            raise ValueError(f"{len(self.turns)} turns but {len(self.answers)} answers")

    def row(self, question_id: int) -> dict[str, Any]:
        """The line of a Spec-Bench question file."""
        return {
            "question_id": question_id,
            "category": self.category,
            "turns": list(self.turns),
            "reference": list(self.answers),
        }

    def text(self) -> str:
        """The whole conversation."""
        return prompt(self.turns, self.answers)

    def answer_spans(self) -> list[tuple[int, int]]:
        """First and last character of each answer in the text, its leading space and EOS included."""
        starts = [len(prompt(self.turns[: i + 1], self.answers[:i])) for i in range(len(self.turns))]
        return [(start, start + len(f" {a}{EOS}")) for start, a in zip(starts, self.answers, strict=True)]


class Task(Protocol):
    """Draws a dialogue of one category; an easy one has fewer parts, which is where training begins."""

    def __call__(self, rng: random.Random, easy: bool = False) -> Dialogue:
        """Draw a dialogue."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a dialogue and, for each, whether the model has to predict it."""

    ids: list[int]
    answer: list[bool]

    def __len__(self) -> int:
        return len(self.ids)


def encode(tokenizer: Tokenizer, dialogues: Iterable[Dialogue]) -> Iterator[Encoded]:
    """Encode dialogues, of which only the answers are to be predicted."""
    rest = iter(dialogues)
    while chunk := list(islice(rest, AT_ONCE)):
        for dialogue, encoding in zip(chunk, tokenizer.encode_batch([d.text() for d in chunk]), strict=True):
            spans = dialogue.answer_spans()
            answer = [any(s <= a and b <= e and a < b for s, e in spans) for a, b in encoding.offsets]
            yield Encoded(encoding.ids, answer)


def batches(stream: Iterator[Encoded], pool: int, tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of similar lengths, of at most `tokens` with padding, in random order: of one pool after another.

    Args:
        pool: sequences that are sorted by length together.

    Yields:
        ids, int64 (rows, length), 0 behind a row's end; and bool (rows, length), which tokens are to be predicted.
    """
    rng = random.Random(seed)
    while True:
        cut: list[list[Encoded]] = [[]]
        for item in sorted(islice(stream, pool), key=len):
            if cut[-1] and (len(cut[-1]) + 1) * len(item) > tokens:
                cut.append([])
            cut[-1].append(item)
        rng.shuffle(cut)
        for batch in cut:
            ids, wanted = [torch.tensor(item.ids) for item in batch], [torch.tensor(item.answer) for item in batch]
            yield pad_sequence(ids, batch_first=True), pad_sequence(wanted, batch_first=True)
