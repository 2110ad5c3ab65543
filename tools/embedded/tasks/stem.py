"""Explanations of natural processes that the model memorises, then a question about one of the steps."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue
from tools.embedded.words import ORDINALS

# topic: definition, field, three steps, an example
TOPICS = {
    "photosynthesis": (
        "the way in which plants make sugar from light",
        "biology",
        [
            "the leaves take in light and air",
            "the roots bring water to the leaves",
            "the plant turns water and air into sugar",
        ],
        "a tree that grows in the sun",
    ),
    "the water cycle": (
        "the path of water between the sea, the sky and the land",
        "geography",
        [
            "the sun heats the sea and water rises as steam",
            "the steam cools and forms clouds",
            "rain falls and flows back to the sea",
        ],
        "a rainy day in the mountains",
    ),
    "digestion": (
        "the way in which the body takes energy from food",
        "biology",
        [
            "the teeth cut the food into small pieces",
            "the stomach mixes it with acid",
            "the gut takes the useful parts into the blood",
        ],
        "a child who eats an apple",
    ),
    "gravity": (
        "the force that pulls masses together",
        "physics",
        [
            "every mass pulls every other mass",
            "a larger mass pulls with more force",
            "a longer distance makes the force weaker",
        ],
        "a stone that falls to the ground",
    ),
    "electricity": (
        "the flow of charge through a wire",
        "physics",
        ["a battery pushes the charge", "the wire leads it through the lamp", "the charge flows back to the battery"],
        "a lamp in the kitchen",
    ),
    "fermentation": (
        "the change of sugar into alcohol or acid by small cells",
        "chemistry",
        ["the yeast eats the sugar", "it gives off gas and alcohol", "the gas makes the dough rise"],
        "bread in a warm oven",
    ),
    "erosion": (
        "the slow loss of soil and rock by wind and water",
        "geology",
        ["rain loosens the soil", "rivers carry it away", "the sand settles in the sea"],
        "a deep valley in the hills",
    ),
    "an earthquake": (
        "a sudden shaking of the ground",
        "geology",
        [
            "plates of rock push against each other",
            "the pressure grows for many years",
            "the rock breaks and the ground shakes",
        ],
        "a broken road after a shock",
    ),
    "rusting": (
        "the change of iron into a red powder",
        "chemistry",
        ["water touches the iron", "oxygen joins the metal", "red flakes fall from the surface"],
        "an old gate by the sea",
    ),
    "the immune system": (
        "the defense of the body against germs",
        "medicine",
        ["a germ enters the body", "white cells find it and attack it", "the body remembers the germ"],
        "a person who has a cold only once",
    ),
    "evolution": (
        "the slow change of living things over time",
        "biology",
        [
            "children differ a little from their parents",
            "the better adapted ones survive",
            "their traits become more common",
        ],
        "birds with strong beaks",
    ),
    "an echo": (
        "a sound that comes back from a wall",
        "physics",
        ["a voice sends waves through the air", "the waves hit a hard wall", "they return to the ear a moment later"],
        "a shout in a deep canyon",
    ),
}
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
