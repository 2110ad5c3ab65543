"""News articles; the summary keeps the first sentence of each paragraph."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue
from tools.embedded.words import CITIES, DAYS, FIRST_NAMES, LAST_NAMES, tables

LEADS: list[str] = tables(__file__)["leads"]
DETAILS: list[str] = tables(__file__)["details"]
SLOTS: dict[str, list[str]] = tables(__file__)["slots"]


def fill(rng: random.Random, template: str) -> str:
    """A sentence from a template with every slot drawn."""
    values = {slot: rng.choice(words) for slot, words in SLOTS.items()}
    return template.format(
        **values,
        city=rng.choice(CITIES),
        day=rng.choice(DAYS),
        first=rng.choice(FIRST_NAMES),
        person=f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        number=rng.randint(2, 99),
    )


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """An article of four or five numbered paragraphs."""
    count = rng.randint(1, 3) if easy else rng.choice([4, 4, 5])
    leads = [fill(rng, template) for template in rng.sample(LEADS, count)]
    paragraphs = []
    for i, lead in enumerate(leads, 1):
        details = [fill(rng, t) for t in rng.sample(DETAILS, rng.choice([1, 1, 2]))]
        paragraphs.append(" ".join([f"{i}. {lead}", *details]))
    question = "Summarize: " + "\n".join(paragraphs)
    return Dialogue(
        "summarization",
        (question,),
        ("Here is the news in short. " + " ".join(f"{i}. {lead}" for i, lead in enumerate(leads, 1)),),
    )
