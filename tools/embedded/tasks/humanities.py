"""Two people of history compared, then a question about the pair."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue, pick

# person: year of birth, country, profession, deed, effect
PEOPLE = {
    "Gutenberg": (1400, "Germany", "printer", "printed books with movable type", "books became cheap"),
    "Plato": (-428, "Greece", "philosopher", "founded a school in Athens", "people still study his dialogues"),
    "Shakespeare": (1564, "England", "writer", "wrote plays such as Hamlet", "the stage became popular"),
    "Mozart": (1756, "Austria", "composer", "wrote operas and symphonies", "his music is played everywhere"),
    "Napoleon": (1769, "France", "general", "led an army across Europe", "many laws were changed"),
    "Gandhi": (1869, "India", "lawyer", "led a movement without violence", "his country became free"),
    "Columbus": (1451, "Italy", "sailor", "crossed the Atlantic", "two worlds came into contact"),
    "Picasso": (1881, "Spain", "painter", "painted Guernica", "modern art found new forms"),
    "Newton": (1643, "England", "scientist", "described the laws of motion", "physics became exact"),
    "Goethe": (1749, "Germany", "poet", "wrote the play Faust", "his verses are known by heart"),
    "Lincoln": (1809, "America", "president", "ended slavery in his country", "millions became free"),
    "Darwin": (1809, "England", "scientist", "wrote about the origin of species", "biology changed forever"),
    "Tolstoy": (1828, "Russia", "writer", "wrote War and Peace", "novels became deeper"),
    "Confucius": (-551, "China", "philosopher", "taught about duty and family", "his words shaped an empire"),
}  # fmt: skip
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
