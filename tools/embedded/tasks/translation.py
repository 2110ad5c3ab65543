"""German to English, several sentences a question; word order changes with the pattern."""

from __future__ import annotations

import random

from tools.embedded.dialogue import Dialogue

# (gender, German, English)
PEOPLE = [
    ("m", "Lehrer", "teacher"), ("f", "Ärztin", "doctor"), ("m", "Bauer", "farmer"), ("f", "Nachbarin", "neighbor"),
    ("n", "Kind", "child"), ("m", "Koch", "cook"), ("f", "Königin", "queen"), ("m", "Student", "student"),
    ("f", "Malerin", "painter"), ("m", "Junge", "boy"), ("n", "Mädchen", "girl"), ("m", "Bäcker", "baker"),
    ("f", "Mutter", "mother"), ("m", "Vater", "father"),
]  # fmt: skip
THINGS = [
    ("m", "Apfel", "apple"), ("n", "Buch", "book"), ("f", "Lampe", "lamp"), ("m", "Brief", "letter"),
    ("n", "Brot", "bread"), ("f", "Tasche", "bag"), ("m", "Stuhl", "chair"), ("n", "Bild", "picture"),
    ("f", "Blume", "flower"), ("m", "Hut", "hat"), ("n", "Fahrrad", "bicycle"), ("f", "Uhr", "clock"),
    ("m", "Schlüssel", "key"), ("n", "Messer", "knife"), ("f", "Karte", "map"), ("m", "Koffer", "suitcase"),
]  # fmt: skip
VERBS = [
    ("kauft", "buys"), ("sucht", "seeks"), ("findet", "finds"), ("verkauft", "sells"), ("zeichnet", "draws"),
    ("trägt", "carries"), ("sieht", "sees"), ("bringt", "brings"), ("versteckt", "hides"), ("putzt", "cleans"),
    ("verliert", "loses"), ("braucht", "needs"),
]  # fmt: skip
ADJECTIVES = [
    ("rot", "red"), ("alt", "old"), ("neu", "new"), ("klein", "small"), ("groß", "big"), ("grün", "green"),
    ("schön", "beautiful"), ("schwer", "heavy"), ("blau", "blue"), ("billig", "cheap"),
]  # fmt: skip
TIMES = [
    ("heute", "today"), ("morgen", "tomorrow"), ("jetzt", "now"), ("am Abend", "in the evening"),
    ("am Montag", "on Monday"), ("im Winter", "in winter"), ("nach der Arbeit", "after work"),
    ("jeden Tag", "every day"), ("vor dem Essen", "before the meal"),
]  # fmt: skip
PLACES = [
    ("im Park", "in the park"), ("auf dem Markt", "at the market"), ("in der Küche", "in the kitchen"),
    ("in der Schule", "at school"), ("am Fluss", "by the river"), ("im Garten", "in the garden"),
    ("vor dem Haus", "in front of the house"), ("auf der Brücke", "on the bridge"), ("im Dorf", "in the village"),
]  # fmt: skip

NOMINATIVE = {"m": "der", "f": "die", "n": "das"}
ACCUSATIVE = {"m": "den", "f": "die", "n": "das"}


def _subject(rng: random.Random) -> tuple[str, str]:
    gender, german, english = rng.choice(PEOPLE)
    return f"{NOMINATIVE[gender]} {german}", f"the {english}"


def _object(rng: random.Random) -> tuple[str, str]:
    gender, german, english = rng.choice(THINGS)
    if rng.random() < 0.4:
        return f"{ACCUSATIVE[gender]} {german}", f"the {english}"
    adjective, translated = rng.choice(ADJECTIVES)
    ending = "en" if gender == "m" else "e"
    return f"{ACCUSATIVE[gender]} {adjective}{ending} {german}", f"the {translated} {english}"


def _sentence(rng: random.Random) -> tuple[str, str]:
    s, o, v = _subject(rng), _object(rng), rng.choice(VERBS)
    t, p = rng.choice(TIMES), rng.choice(PLACES)
    pattern = rng.randrange(6)
    if pattern == 0:
        pair = f"{s[0]} {v[0]} {o[0]} {p[0]}", f"{s[1]} {v[1]} {o[1]} {p[1]}"
    elif pattern == 1:  # the German verb stays second, the English one does not
        pair = f"{t[0]} {v[0]} {s[0]} {o[0]} {p[0]}", f"{t[1]}, {s[1]} {v[1]} {o[1]} {p[1]}"
    elif pattern == 2:
        pair = f"{s[0]} {v[0]} {t[0]} {o[0]}", f"{s[1]} {v[1]} {o[1]} {t[1]}"
    elif pattern == 3:
        a, b, other = rng.choice(ADJECTIVES), rng.choice(ADJECTIVES), _subject(rng)
        pair = f"{s[0]} ist {a[0]}, aber {other[0]} ist {b[0]}", f"{s[1]} is {a[1]}, but {other[1]} is {b[1]}"
    elif pattern == 4:
        other, w, q = _subject(rng), rng.choice(VERBS), _object(rng)
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
