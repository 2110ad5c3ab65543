"""One conversation of the synthetic world: the questions and the answers that the model should give."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol


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


class Maker(Protocol):
    """A task: draws a dialogue; an easy one has fewer parts, which is where training begins."""

    def __call__(self, rng: random.Random, easy: bool = False) -> Dialogue:
        """Draw a dialogue."""
        ...


def pick(rng: random.Random, items: list[str], count: int) -> list[str]:
    """Distinct items in random order."""
    return rng.sample(items, count)


def listing(items: list[str]) -> str:
    """Join words as English does: "a", "a and b", "a, b and c"."""
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]
