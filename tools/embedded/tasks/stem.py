"""Explanations of natural processes that the model memorises, then a question about one of the steps."""

from __future__ import annotations

import random
from typing import Any

from tools.embedded.dialogue import Dialogue
from tools.embedded.words import ORDINALS, tables

# topic: definition, field, three steps, an example
TOPICS: dict[str, list[Any]] = tables(__file__)
READERS = ["child", "farmer", "nurse", "student", "tourist", "painter", "driver", "lawyer", "neighbor", "soldier"]
ASKS = [
    "Explain {topic} to a {reader}.",
    "What is {topic}? Describe the steps for a {reader}.",
    "How would you describe {topic} to a {reader}?",
    "A {reader} asks you about {topic}. What do you say?",
]


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """An explanation in three steps for a reader."""
    topic, reader = rng.choice(sorted(TOPICS)), rng.choice(READERS)
    definition, field, steps, example = TOPICS[topic]
    numbered = " ".join(f"The {o} step: {s}." for o, s in zip(ORDINALS, steps, strict=False))
    first = (
        f"This is an explanation for a {reader}. In {field}, {topic} is {definition}. It works in three steps. "
        f"{numbered} A good example is {example}."
    )
    choice = rng.randrange(3)
    if choice == 0:
        i = rng.randrange(3)
        follow = f"Explain the {ORDINALS[i]} step again."
        second = (
            f"Of course. In the {ORDINALS[i]} step of {topic}, {steps[i]}. You can see this in {example}. "
            f"I hope that this helps the {reader}."
        )
    elif choice == 1:
        follow = "Put the steps in a numbered list."
        second = f"These are the steps of {topic}:\n" + "\n".join(f"{i}. {s}" for i, s in enumerate(steps, 1))
    else:
        follow = "Say the steps from last to first."
        second = "Going backwards: " + " Before that, ".join(f"{s}." for s in reversed(steps)) + f" This is {topic}."
    return Dialogue("stem", (rng.choice(ASKS).format(topic=topic, reader=reader), follow), (first, second))
