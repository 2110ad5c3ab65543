"""Letters, stories and reviews, then an edit of the previous answer."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue, pick
from tools.embedded.words import CITIES, DAYS, FIRST_NAMES, tables

# kind: the sentences of its text
KINDS: dict[str, list[str]] = tables(__file__)
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
