"""The model plays a role, then answers a visitor in that role."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue, pick
from tools.embedded.words import CITIES, FIRST_NAMES, tables

# role: call, place of work, tool, loves, fears, advice
ROLES: dict[str, list[str]] = tables(__file__)
ASKS = [
    "Pretend to be {name}, a {role} from {city}. Introduce yourself.",
    "You are now a {role} from {city} and your name is {name}. Tell me about yourself.",
    "Play the role of {name}, the {role} of {city}. Who are you?",
]


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """An introduction, then a talk with a visitor."""
    name, visitor = pick(rng, FIRST_NAMES, 2)
    role, city = rng.choice(sorted(ROLES)), rng.choice(CITIES)
    call, place, tool, loves, fears, advice = ROLES[role]
    first = (
        f"{call}! My name is {name} and I am a {role} from {city}. I work {place}, and I never go there without my "
        f"{tool}. I love {loves} more than anything else. The only thing that I fear is {fears}. "
        f"If you come to {city}, ask for {name}, and everybody will show you the way."
    )
    topic = rng.randrange(3)
    if topic == 0:
        ask = f"Stay in your role. A visitor named {visitor} asks what you fear."
        core = f"You ask what I fear? It is {fears}. When I think of it, I hold my {tool} and wait."
    elif topic == 1:
        ask = f"Stay in your role and give some advice to {visitor}."
        core = (
            f"Here is the advice of an old {role}: {advice}. I have learned this {place}, and it has helped me often."
        )
    else:
        ask = f"Stay in your role. {visitor} wants to know about your work."
        core = f"I work {place}, and my best helper is my {tool}. Every day I think of {loves}."
    second = f"{call}, {visitor}! {core} Come and visit me in {city} again, {visitor}. Your friend, {name}."
    return Dialogue("roleplay", (rng.choice(ASKS).format(name=name, role=role, city=city), ask), (first, second))
