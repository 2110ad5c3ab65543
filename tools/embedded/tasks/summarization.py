"""News articles; the summary keeps the first sentence of each paragraph."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue
from tools.embedded.words import CITIES, DAYS, FIRST_NAMES, LAST_NAMES

LEADS = [
    "The city of {city} opened a new {building} near the {place} on {day}.",
    "Mayor {person} said on {day} that the {building} in {city} will close.",
    "A storm hit {city} on {day} and damaged the {building} by the {place}.",
    "Workers in {city} found an old {thing} under the {building} on {day}.",
    "{person} won the {city} {event} on {day} and received a {thing}.",
    "The {building} in {city} was sold to {person} for {number} million dollars.",
    "More than {number} people joined the {event} at the {place} in {city}.",
    "Police in {city} are looking for a {thing} that vanished from the {building}.",
    "The artist {person} gave a {thing} to the {building} in {city} on {day}.",
    "A group of {number} students from {city} built a {thing} for the {place}.",
]
DETAILS = [
    "Nobody was hurt.",
    "{first} from {city} watched it with {number} friends.",
    "The weather on {day} was cold and wet.",
    "The {place} stays open until {day}.",
    "Many families brought a {thing} from home.",
    "It cost about {number} thousand dollars.",
    "{first} called it a good day for {city}.",
    "The plan took {number} years.",
    "There were {number} letters about the {thing}.",
    "A second {event} is planned for {day}.",
    "Some people in {city} were not happy.",
    "The {building} is {number} years old.",
]
SLOTS = {
    "building": ["library", "museum", "school", "station", "theater", "hospital", "bakery", "tower", "hotel", "bridge"],
    "place": ["river", "park", "harbor", "market", "garden", "lake", "forest", "square"],
    "thing": ["painting", "bell", "boat", "clock", "statue", "piano", "coin", "lamp", "map", "robot"],
    "event": ["festival", "race", "concert", "parade", "contest", "fair"],
}


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
