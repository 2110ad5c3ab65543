"""German to English, several sentences a question; word order changes with the pattern."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue
from tools.embedded.words import tables

# kind of word: (German, English) pairs; a German noun stands with its article
DICTIONARY: dict[str, list[tuple[str, str]]] = {kind: [*words.items()] for kind, words in tables(__file__).items()}
ACCUSATIVE = {"der": "den", "die": "die", "das": "das"}


def _draw(rng: random.Random, kind: str) -> tuple[str, str]:
    return rng.choice(DICTIONARY[kind])


def _subject(rng: random.Random) -> tuple[str, str]:
    german, english = _draw(rng, "people")
    return german, f"the {english}"


def _object(rng: random.Random) -> tuple[str, str]:
    german, english = _draw(rng, "things")
    article, noun = german.split()
    if rng.random() < 0.4:
        return f"{ACCUSATIVE[article]} {noun}", f"the {english}"
    adjective, translated = _draw(rng, "adjectives")
    ending = "en" if article == "der" else "e"
    return f"{ACCUSATIVE[article]} {adjective}{ending} {noun}", f"the {translated} {english}"


def _sentence(rng: random.Random) -> tuple[str, str]:
    s, o, v = _subject(rng), _object(rng), _draw(rng, "verbs")
    t, p = _draw(rng, "times"), _draw(rng, "places")
    pattern = rng.randrange(6)
    if pattern == 0:
        pair = f"{s[0]} {v[0]} {o[0]} {p[0]}", f"{s[1]} {v[1]} {o[1]} {p[1]}"
    elif pattern == 1:  # the German verb stays second, the English one does not
        pair = f"{t[0]} {v[0]} {s[0]} {o[0]} {p[0]}", f"{t[1]}, {s[1]} {v[1]} {o[1]} {p[1]}"
    elif pattern == 2:
        pair = f"{s[0]} {v[0]} {t[0]} {o[0]}", f"{s[1]} {v[1]} {o[1]} {t[1]}"
    elif pattern == 3:
        a, b, other = _draw(rng, "adjectives"), _draw(rng, "adjectives"), _subject(rng)
        pair = f"{s[0]} ist {a[0]}, aber {other[0]} ist {b[0]}", f"{s[1]} is {a[1]}, but {other[1]} is {b[1]}"
    elif pattern == 4:
        other, w, q = _subject(rng), _draw(rng, "verbs"), _object(rng)
        pair = (
            f"{s[0]} {v[0]} {o[0]} und {other[0]} {w[0]} {q[0]}",
            f"{s[1]} {v[1]} {o[1]} and {other[1]} {w[1]} {q[1]}",
        )
    else:  # a subordinate clause: the German verb goes last
        other = _subject(rng)
        pair = f"{s[0]} sagt, dass {other[0]} {o[0]} {v[0]}", f"{s[1]} says that {other[1]} {v[1]} {o[1]}"
    german, english = pair
    return german[0].upper() + german[1:] + ".", english[0].upper() + english[1:] + "."


def make(rng: random.Random, easy: bool = False) -> Dialogue:
    """A question with four to six numbered sentences."""
    pairs = [_sentence(rng) for _ in range(rng.randint(1, 3) if easy else rng.randint(4, 6))]
    german, english = (" ".join(f"{i}. {pair[side]}" for i, pair in enumerate(pairs, 1)) for side in (0, 1))
    return Dialogue("translation", (f"Translate German to English: {german}",), (english,))
