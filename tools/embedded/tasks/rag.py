"""Retrieved passages and a question; the answer quotes the right passage."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue, pick
from tools.embedded.words import CITIES, FIRST_NAMES, LAST_NAMES

JOBS = ["painting", "medicine", "writing", "singing", "flying", "law", "chemistry", "sailing", "cooking", "teaching"]
HOBBIES = ["chess", "tennis", "piano", "guitar", "golf", "violin", "poker", "drums"]
PRODUCTS = ["bicycles", "cameras", "clocks", "shoes", "lamps", "toys", "boats", "chairs", "phones", "tools"]
MATERIALS = ["stone", "wood", "brick", "glass", "steel", "marble"]

# each kind: (sentence, question, slot that answers it)
# The value comes right after the name: a small model then finds it by the words before it.
PERSON = [
    ("The home town of {name} is {city}.", "Where does {name} come from?", "city"),
    ("The job of {name} is {job}.", "What is the job of {name}?", "job"),
    ("The hobby of {name} is {hobby}.", "What does {name} like to play?", "hobby"),
]
COMPANY = [
    ("The product of {name} is {product}.", "What does {name} make?", "product"),
    ("The founder of {name} is {person}.", "Who founded {name}?", "person"),
    ("The seat of {name} is {city}.", "In which city is {name}?", "city"),
]
TOWER = [
    ("The material of {name} is {material}.", "What is {name} made of?", "material"),
    ("The builder of {name} is {person}.", "Who built {name}?", "person"),
    ("The height of {name} is {count} meters.", "How high is {name}?", "count"),
]


def _passage(rng: random.Random, kind: int, last: str, first: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The name of an entity and its (sentence, question, answer) triples."""
    name = (f"{first} {last}", f"{last} Company", f"{last} Tower")[kind]
    slots = {
        "name": name,
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
        "hobby": rng.choice(HOBBIES),
        "product": rng.choice(PRODUCTS),
        "material": rng.choice(MATERIALS),
        "person": f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        "count": str(rng.randint(20, 99)),
    }
    rows = (PERSON, COMPANY, TOWER)[kind]
    return name, [(s.format(**slots), q.format(**slots), slots[key]) for s, q, key in rows]


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """Four passages, one of which answers."""
    count = rng.randint(1, 2) if easy else 4
    lasts, firsts = pick(rng, LAST_NAMES, count), pick(rng, FIRST_NAMES, count)
    passages = [_passage(rng, rng.randrange(3), last, first) for last, first in zip(lasts, firsts, strict=True)]
    name, rows = rng.choice(passages)
    asked = rng.randrange(3)
    quote, question, answer = rows[asked]
    context = "\n".join(f"{title}: " + " ".join(s for s, _, _ in facts) for title, facts in passages)
    others = " ".join(s for i, (s, _, _) in enumerate(rows) if i != asked)
    reply = (
        f'The passage about {name} says: "{quote}" So the answer is {answer}. '
        f"The same passage adds: {others} No other passage is about {name}."
    )
    return Dialogue("rag", (f"{context}\n{question}",), (reply,))
