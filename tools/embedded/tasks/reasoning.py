"""Orders of four people from comparisons, then a fifth person joins at one end."""

from __future__ import annotations

import itertools
import random

from tools.embedded.dialogue import Dialogue, listing, pick
from tools.embedded.words import FIRST_NAMES

# more, most, less, least
SCALES = [
    ("taller", "tallest", "shorter", "shortest"),
    ("older", "oldest", "younger", "youngest"),
    ("faster", "fastest", "slower", "slowest"),
    ("richer", "richest", "poorer", "poorest"),
    ("stronger", "strongest", "weaker", "weakest"),
]


def _answer(people: list[str], scale: tuple[str, str, str, str]) -> str:
    more, most, _, least = scale
    chain = " ".join(f"{a} is {more} than {b}." for a, b in itertools.pairwise(people))
    return (
        f"{chain} So from the {most} to the {least} the order is {', '.join(people)}. "
        f"The {most} is {people[0]} and the {least} is {people[-1]}. Between them come {listing(people[1:-1])}."
    )


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """The chain is told from either end, and each link in either direction."""
    *people, fifth = pick(rng, FIRST_NAMES, 4 if easy else 5)
    scale = rng.choice(SCALES)
    more, most, less, least = scale
    links = list(itertools.pairwise(people))
    if rng.random() < 0.5:
        links.reverse()
    told = [f"{a} is {more} than {b}." if rng.random() < 0.6 else f"{b} is {less} than {a}." for a, b in links]
    ask = rng.choice([f"Who is the {most}?", f"Who is the {least}?", "What is the order?"])
    if rng.random() < 0.5:
        joined, second = [fifth, *people], f"Now {fifth} joins, who is {more} than {people[0]}. What is the new order?"
    else:
        joined, second = [*people, fifth], f"Now {fifth} joins, who is {less} than {people[-1]}. What is the new order?"
    return Dialogue("reasoning", (" ".join([*told, ask]), second), (_answer(people, scale), _answer(joined, scale)))
