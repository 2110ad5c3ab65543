"""Letters, stories and reviews, then an edit of the previous answer."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue, pick
from tools.embedded.words import CITIES, DAYS, FIRST_NAMES

# kind: the sentences of its text
KINDS = {
    "a postcard": [
        "Dear {to}, I send you greetings from {city}.",
        "The weather is {mood} and I walk through the old streets every day.",
        "On {day} I visited the museum and bought a {thing} for you.",
        "The food is wonderful and the people are kind.",
        "I will come home soon and tell you everything. Your friend, {by}.",
    ],
    "an invitation": [
        "Dear {to}, I would like to invite you to my party in {city}.",
        "We meet on {day} at my house, and it will be a {mood} evening.",
        "There will be music, good food and a small game.",
        "Please bring a {thing} and your best smile.",
        "I hope that you can come. Best wishes, {by}.",
    ],
    "a short story": [
        "Once upon a time {by} lived in {city} and had a {thing}.",
        "One {mood} {day} the {thing} was gone.",
        "{by} asked {to}, who lived next door, for help.",
        "Together they looked in every street and under every bridge.",
        "In the end {to} found the {thing}, and they were friends forever.",
    ],
    "a business email": [
        "Dear {to}, thank you for your message from {day}.",
        "Our office in {city} has checked the {thing} that you ordered.",
        "The result of the test was {mood}, and we are ready to send it.",
        "Please tell us your address and the best time.",
        "We look forward to your answer. Kind regards, {by}.",
    ],
    "a review": [
        "{by} visited the new shop of {to} in {city} on {day}.",
        "The first impression was {mood}, and the rooms were clean.",
        "The best part was a {thing} in the window.",
        "The prices are fair and the service is quick.",
        "I would go there again and tell my friends about it.",
    ],
}
ASKS = [
    "Write {kind} from {by} to {to} about {city}. It should mention {day}, a {thing} and the word {mood}.",
    "Please write {kind}. Use the names {by} and {to}, the city {city}, the day {day}, a {thing} and the word {mood}.",
    "Compose {kind} with {by} and {to} in {city}. Mention a {thing}, the day {day} and the word {mood}.",
]
# the asking order of the two names is always: by, then to
MOODS = ["sunny", "quiet", "great", "strange", "warm", "perfect", "gray", "lovely"]
THINGS = ["book", "lamp", "hat", "ring", "vase", "clock", "camera", "carpet", "mirror", "kite"]


def edit(rng: random.Random, sentences: list[str], by: str) -> tuple[str, str]:
    """A request to edit a text of several sentences, and the edited text."""
    choice = rng.randrange(5)
    if choice == 0:
        ask = rng.choice(["Make it shorter.", "Shorten your previous answer."])
        return ask, f"{sentences[0]} {sentences[2]} {sentences[-1]}"
    if choice == 1:
        ask = rng.choice(["Rewrite your previous response as a bullet list.", "Turn it into bullet points."])
        return ask, "\n".join(f"- {s}" for s in sentences)
    if choice == 2:
        new = rng.choice([n for n in FIRST_NAMES if n not in " ".join(sentences)])
        return f"Change the name {by} to {new}.", " ".join(sentences).replace(by, new)
    if choice == 3:
        ask = rng.choice(["Number the sentences.", "Rewrite it as a numbered list."])
        return ask, "\n".join(f"{i}. {s}" for i, s in enumerate(sentences, 1))
    title = rng.choice(["A Good Day", "News", "My Friend", "The Surprise"])
    return f'Add the title "{title}" and keep the text.', f"{title}\n" + " ".join(sentences)


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """A text on request, then its edit."""
    by, to = pick(rng, FIRST_NAMES, 2)
    kind = rng.choice(sorted(KINDS))
    slots = {
        "by": by,
        "to": to,
        "kind": kind,
        "city": rng.choice(CITIES),
        "day": rng.choice(DAYS),
        "mood": rng.choice(MOODS),
        "thing": rng.choice(THINGS),
    }
    sentences = [s.format(**slots) for s in KINDS[kind]]
    second, edited = edit(rng, sentences, by)
    return Dialogue("writing", (rng.choice(ASKS).format(**slots), second), (" ".join(sentences), edited))
