"""Tasks whose answers the model knows by heart: of countries, processes of nature, people of history, and roles."""

from __future__ import annotations

import random

from .dialogue import CITIES, FIRST_NAMES, WORLD, Dialogue

COUNTRIES: dict[str, list[str]] = WORLD["qa"]["countries"]
COUNTRY_FACTS: list[tuple[str, list[str]]] = [*WORLD["qa"]["facts"].items()]
PEOPLE = WORLD["humanities"]["people"]


def qa(rng: random.Random, easy: bool = False) -> Dialogue:
    """One country or two, each in full: the fact that was asked for, then the others in their fixed order."""
    frame = rng.choice(WORLD["qa"]["frames"])
    countries = rng.sample(sorted(COUNTRIES), 2)
    asked = [rng.randrange(len(COUNTRY_FACTS)) for _ in countries]
    a, b = (rng.choice(COUNTRY_FACTS[i][1]).format(c=country) for i, country in zip(asked, countries, strict=True))
    question = frame.format(a=a, b=b)
    answers = [_country(country, i) for country, i in zip(countries, asked, strict=True)]
    answer = " ".join(answers if "{b}" in frame else answers[:1])
    return Dialogue("qa", (question[0].upper() + question[1:],), (answer,))


def _country(country: str, first: int) -> str:
    sentences = [fact.format(*COUNTRIES[country], c=country) for fact, _ in COUNTRY_FACTS]
    return " ".join([sentences[first], *sentences[:first], *sentences[first + 1 :]])


def stem(rng: random.Random, easy: bool = False) -> Dialogue:
    """An explanation in three steps for a reader, then a question about the steps."""
    topics = WORLD["stem"]["topics"]
    topic, reader = rng.choice(sorted(topics)), rng.choice(WORLD["stem"]["readers"])
    definition, field, steps, example = topics[topic]
    ordinals = WORLD["ordinals"]
    numbered = " ".join(f"The {o} step: {s}." for o, s in zip(ordinals, steps, strict=False))
    first = (
        f"This is an explanation for a {reader}. In {field}, {topic} is {definition}. It works in three steps. "
        f"{numbered} A good example is {example}."
    )
    choice = rng.randrange(3)
    if choice == 0:
        i = rng.randrange(3)
        follow = f"Explain the {ordinals[i]} step again."
        second = (
            f"Of course. In the {ordinals[i]} step of {topic}, {steps[i]}. You can see this in {example}. "
            f"I hope that this helps the {reader}."
        )
    elif choice == 1:
        follow = "Put the steps in a numbered list."
        second = f"These are the steps of {topic}:\n" + "\n".join(f"{i}. {s}" for i, s in enumerate(steps, 1))
    else:
        follow = "Say the steps from last to first."
        second = "Going backwards: " + " Before that, ".join(f"{s}." for s in reversed(steps)) + f" This is {topic}."
    ask = rng.choice(WORLD["stem"]["asks"]).format(topic=topic, reader=reader)
    return Dialogue("stem", (ask, follow), (first, second))


def humanities(rng: random.Random, easy: bool = False) -> Dialogue:
    """Two people of history compared, then a question about the pair."""
    a, b = rng.sample(sorted(PEOPLE), 2)
    choice = rng.randrange(3)
    if choice == 0:
        early, late = sorted((a, b), key=lambda person: PEOPLE[person][0])
        follow = "Which of the two was born earlier?"
        second = f"{a} was born in {_born(a)} and {b} was born in {_born(b)}."
        second += f" So {early} was born earlier than {late}." if _born(a) != _born(b) else " So it is the same year."
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
    ask = rng.choice(WORLD["humanities"]["asks"]).format(a=a, b=b)
    return Dialogue("humanities", (ask, follow), (first, second))


def _born(person: str) -> str:
    year = PEOPLE[person][0]
    return f"{-year} BC" if year < 0 else str(year)


def _life(person: str) -> str:
    _, country, profession, deed, effect = PEOPLE[person]
    return f"{person} was a {profession} from {country}, born in {_born(person)}. He {deed}, and so {effect}."


def roleplay(rng: random.Random, easy: bool = False) -> Dialogue:
    """The model introduces itself in a role, then talks with a visitor in that role."""
    name, visitor = rng.sample(FIRST_NAMES, 2)
    roles = WORLD["roleplay"]["roles"]
    role, city = rng.choice(sorted(roles)), rng.choice(CITIES)
    call, place, tool, loves, fears, advice = roles[role]
    first = (
        f"{call}! My name is {name} and I am a {role} from {city}. I work {place}, and I never go there without my "
        f"{tool}. I love {loves} more than anything else. The only thing that I fear is {fears}. "
        f"If you come to {city}, ask for {name}, and everybody will show you the way."
    )
    topic = rng.randrange(3)
    if topic == 0:
        follow = f"Stay in your role. A visitor named {visitor} asks what you fear."
        core = f"You ask what I fear? It is {fears}. When I think of it, I hold my {tool} and wait."
    elif topic == 1:
        follow = f"Stay in your role and give some advice to {visitor}."
        core = (
            f"Here is the advice of an old {role}: {advice}. I have learned this {place}, and it has helped me often."
        )
    else:
        follow = f"Stay in your role. {visitor} wants to know about your work."
        core = f"I work {place}, and my best helper is my {tool}. Every day I think of {loves}."
    second = f"{call}, {visitor}! {core} Come and visit me in {city} again, {visitor}. Your friend, {name}."
    ask = rng.choice(WORLD["roleplay"]["asks"]).format(name=name, role=role, city=city)
    return Dialogue("roleplay", (ask, follow), (first, second))
