"""python -m tools.novelty: write data/novelty/question.jsonl, 20 prompts whose answers hold little that repeats.

Invented words, random numbers, keys, and free verse: the text on which a draft copied from the past is worth least.
Deterministic; the file is committed, and a test checks that this program still writes it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "data/novelty/question.jsonl"
ONSETS = [
    "b",
    "br",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "z",
]
VOWELS = ["a", "e", "i", "o", "u", "ae", "ou", "ia"]
CODAS = ["", "l", "m", "n", "nd", "r", "rk", "s", "st", "x"]
IMAGES = ["rust", "salt", "glass", "smoke", "amber", "frost", "copper", "moss", "thunder", "linen", "ash", "tide"]


def word(rng: random.Random) -> str:
    """A word that no language has."""
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.randrange(2, 4)))


def key(rng: random.Random, length: int) -> str:
    """A random key."""
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz23456789") for _ in range(length))


def questions(seed: int = 11) -> list[dict[str, object]]:
    """The 20 prompts in Spec-Bench's format, five of each kind."""
    rng = random.Random(seed)
    rows: list[dict[str, object]] = []
    for i in range(20):
        kind = ("invented_words", "numbers", "keys", "free_verse")[i // 5]
        if kind == "invented_words":
            shown = ", ".join(word(rng) for _ in range(12))
            turn = f"Go on with this list of invented words, each one new and none of them real: {shown}"
        elif kind == "numbers":
            shown = "\n".join(" ".join(str(rng.randrange(100, 100000)) for _ in range(5)) for _ in range(4))
            turn = f"Continue this table of random numbers by ten more rows:\n{shown}"
        elif kind == "keys":
            shown = "\n".join(f"{word(rng)}: {key(rng, 20)}" for _ in range(6))
            turn = f"Write ten more accounts with a fresh random key each:\n{shown}"
        else:
            first, second, third = rng.sample(IMAGES, 3)
            turn = f"Write free verse about {first}, {second} and a {word(rng)} of {third}; no line and no image twice."
        rows.append({"question_id": 9001 + i, "category": kind, "turns": [turn]})
    return rows


def main() -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text("".join(json.dumps(row) + "\n" for row in questions()), encoding="utf-8")
    print(FILE)


if __name__ == "__main__":
    main()
