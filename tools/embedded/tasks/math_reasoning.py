"""Word problems in the manner of GSM8K, with small numbers and one equation a sentence."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue, pick
from tools.embedded.words import FIRST_NAMES

ITEMS = ["apples", "books", "coins", "stamps", "cards", "pencils", "marbles", "cookies", "shells", "eggs"]
BOXES = ["bags", "boxes", "baskets", "packs", "jars"]


class _Story:
    """A problem under construction: its sentences, the steps of its answer, and the count so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.who, self.friend = pick(rng, FIRST_NAMES, 2)
        self.item = rng.choice(ITEMS)
        self.count = rng.randint(5, 30)
        self.story = [f"{self.who} has {self.count} {self.item}."]
        self.steps = [f"{self.who} has {self.count} {self.item}."]

    def _event(self, sentence: str, *equations: str) -> None:
        """Tell an event; the answer repeats it, then works it out."""
        self.story.append(sentence)
        self.steps.append(" ".join([sentence, *(f"{e} {self.item}." for e in equations)]))

    def boxes(self) -> None:
        """Some boxes with the same number in each."""
        n, each, box = self.rng.randint(2, 6), self.rng.randint(2, 6), self.rng.choice(BOXES)
        total = self.count + n * each
        self._event(
            f"{self.who} buys {n} {box} with {each} {self.item} each.",
            f"The {box} hold {n} * {each} = {n * each}",
            f"This makes {self.count} + {n * each} = {total}",
        )
        self.count = total

    def gift(self) -> None:
        """The friend adds some."""
        n = self.rng.randint(2, 15)
        self._event(
            f"{self.friend} gives {self.who} {n} more {self.item}.", f"This makes {self.count} + {n} = {self.count + n}"
        )
        self.count += n

    def loss(self) -> None:
        """Some are given away or lost."""
        n = self.rng.randint(2, min(15, self.count - 2))
        lost = self.rng.random() < 0.5
        sentence = f"{self.who} loses {n} {self.item}." if lost else f"{self.who} gives {self.friend} {n} {self.item}."
        self._event(sentence, f"This leaves {self.count} - {n} = {self.count - n}")
        self.count -= n

    def double(self) -> None:
        """The count doubles."""
        self._event(f"Then {self.who} doubles the {self.item}.", f"This makes {self.count} * 2 = {self.count * 2}")
        self.count *= 2


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """A story of two or three events."""
    story = _Story(rng)
    for _ in range(rng.randint(1, 2) if easy else rng.choice([2, 3, 3])):
        events = [story.boxes, story.gift] if story.count < 60 else []
        events += [story.loss] if story.count > 8 else []
        events += [story.double] if story.count < 25 else []
        rng.choice(events)()
    question = " ".join(story.story) + f" How many {story.item} does {story.who} have now?"
    answer = " ".join(story.steps) + f" The answer is {story.count}."
    return Dialogue("math_reasoning", (question,), (answer,))
