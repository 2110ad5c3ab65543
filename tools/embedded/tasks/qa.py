"""Questions over a small knowledge base of countries, which the model has to memorise."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue
from tools.embedded.words import tables

# country: capital, continent, language, currency, known for
COUNTRIES: dict[str, list[str]] = tables(__file__)
FACTS = [
    "The capital of {c} is {0}.",
    "{c} is a country in {1}.",
    "Most people in {c} speak {2}.",
    "The currency of {c} is the {3}.",
    "{c} is known for {4}.",
]
ASKS = [
    ["what is the capital of {c}", "which city is the capital of {c}", "what city is the seat of government of {c}"],
    ["on which continent is {c}", "where in the world is {c}", "in what part of the world does {c} lie"],
    ["what language do people in {c} speak", "which language is spoken in {c}", "what do people in {c} speak"],
    ["what is the currency of {c}", "what money is used in {c}", "how do people pay in {c}"],
    ["what is {c} known for", "what is {c} famous for", "why do people visit {c}"],
]
FRAMES = ["{a}?", "{a} and {b}?", "i would like to know {a}?", "can you tell me {a}?", "{a}, and also {b}?"]


def _facts(country: str, first: int) -> str:
    """All facts of a country, the asked one first, the others in their fixed order."""
    order = [first] + [i for i in range(len(FACTS)) if i != first]
    return " ".join(FACTS[i].format(*COUNTRIES[country], c=country) for i in order)


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """One country in full, or two countries with two or three facts each."""
    frame = rng.choice(FRAMES)
    one, two = rng.sample(sorted(COUNTRIES), 2)
    i, j = rng.randrange(len(FACTS)), rng.randrange(len(FACTS))
    question = frame.format(a=rng.choice(ASKS[i]).format(c=one), b=rng.choice(ASKS[j]).format(c=two))
    answer = _facts(one, i)
    if "{b}" in frame:
        answer += " " + _facts(two, j)
    return Dialogue("qa", (question[0].upper() + question[1:],), (answer,))
