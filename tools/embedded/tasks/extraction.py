"""Facts about four people in running text, extracted as lines, then in another format."""

from __future__ import annotations

import json
import random

from tools.embedded.dialogue import Dialogue, pick
from tools.embedded.words import CITIES, FIRST_NAMES

JOBS = ["doctor", "baker", "pilot", "teacher", "farmer", "lawyer", "singer", "driver"]
SENTENCES = [
    "{name} is {age} years old and works as a {job} in {city}.",
    "In {city} lives {name}, a {job} of {age} years.",
    "The {job} {name} comes from {city} and is {age}.",
    "At the age of {age}, {name} moved to {city} to work as a {job}.",
]
ASKS = [
    "Extract the name, age, job and city of each person: {text}",
    "Read the text and list the name, age, job and city of everybody. {text}",
    "{text}\nList each person with age, job and city.",
]


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """Lines first; then JSON, a table, one column, or one person."""
    count = rng.randint(1, 2) if easy else 4
    names, cities, jobs = (pick(rng, items, count) for items in (FIRST_NAMES, CITIES, JOBS))
    people = [
        {"name": n, "age": rng.randint(18, 79), "job": j, "city": c}
        for n, j, c in zip(names, jobs, cities, strict=True)
    ]
    text = " ".join(s.format(**p) for s, p in zip(rng.sample(SENTENCES, count), people, strict=True))
    first = "\n".join("Name: {name}, Age: {age}, Job: {job}, City: {city}".format(**p) for p in people)
    choice = rng.randrange(4)
    if choice == 0:
        follow = "Write it as JSON, one object a line."
        second = "\n".join(json.dumps(p) for p in people)
    elif choice == 1:
        follow = "Turn this into a table."
        second = "| Name | Age | Job | City |\n" + "\n".join(
            "| {name} | {age} | {job} | {city} |".format(**p) for p in people
        )
    elif choice == 2:
        follow = "Now only the names and the cities."
        second = "\n".join("Name: {name}, City: {city}".format(**p) for p in people)
    else:
        who = rng.choice(people)
        follow = f"Write one sentence about each person, and begin with {who['name']}."
        order = [who] + [p for p in people if p is not who]
        second = " ".join("{name} is a {job} from {city} and is {age} years old.".format(**p) for p in order)
    return Dialogue("extraction", (rng.choice(ASKS).format(text=text), follow), (first, second))
