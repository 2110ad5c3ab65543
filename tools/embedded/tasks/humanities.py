"""Two people of history compared, then a question about the pair."""

from __future__ import annotations

import random
from typing import Any

from tools.embedded.dialogue import Dialogue, pick
from tools.embedded.words import tables

# person: year of birth, country, profession, deed, effect
PEOPLE: dict[str, list[Any]] = tables(__file__)
ASKS = [
    "Compare {a} and {b}.",
    "Who were {a} and {b}, and what did they do?",
    "What do you know about {a} and {b}?",
    "Write a short text about {a} and {b} for a history class.",
    "Why do {a} and {b} matter today?",
    "Tell me about the lives of {a} and {b}.",
]


def _year(year: int) -> str:
    return f"{-year} BC" if year < 0 else str(year)


def _life(person: str) -> str:
    year, country, profession, deed, effect = PEOPLE[person]
    return f"{person} was a {profession} from {country}, born in {_year(year)}. He {deed}, and so {effect}."


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """A comparison and a follow-up."""
    a, b = pick(rng, sorted(PEOPLE), 2)
    choice = rng.randrange(3)
    if choice == 0:
        early, late = sorted((a, b), key=lambda p: PEOPLE[p][0])
        follow = "Which of the two was born earlier?"
        second = f"{a} was born in {_year(PEOPLE[a][0])} and {b} was born in {_year(PEOPLE[b][0])}."
        second += (
            f" So {early} was born earlier than {late}." if PEOPLE[a][0] != PEOPLE[b][0] else " So it is the same year."
        )
    elif choice == 1:
        follow = "Make a list of their deeds."
        second = f"- {a}, the {PEOPLE[a][2]}, {PEOPLE[a][3]}.\n- {b}, the {PEOPLE[b][2]}, {PEOPLE[b][3]}."
    else:
        who = rng.choice([a, b])
        follow = f"Write only about {who}."
        second = f"{_life(who)} This is why people still talk about {who} today."
    first = (
        f"{_life(a)} {_life(b)} Both of them changed the world, {a} as a {PEOPLE[a][2]} and {b} as a {PEOPLE[b][2]}."
    )
    return Dialogue("humanities", (rng.choice(ASKS).format(a=a, b=b), follow), (first, second))
