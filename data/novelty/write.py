"""Write question.jsonl, 30 prompts whose answers hold little that repeats: `python -m data.novelty.write`.

Invented words, random numbers, keys, free verse, mixed languages and dense technical prose: the text on which a draft
copied from the past is worth least.
Deterministic; the file is committed, and a test checks that this program still writes it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from evaluation.errors import user_errors
from model.files import write_text

FILE = Path(__file__).with_name("question.jsonl")
ONSETS = [
    "b", "br", "d", "dr", "f", "fl", "g", "gr", "k", "kl", "l", "m", "n", "p", "pr", "s", "st", "t", "tr", "v", "z",
]  # fmt: skip
VOWELS = ["a", "e", "i", "o", "u", "ae", "ou", "ia"]
CODAS = ["", "l", "m", "n", "nd", "r", "rk", "s", "st", "x"]
IMAGES = ["rust", "salt", "glass", "smoke", "amber", "frost", "copper", "moss", "thunder", "linen", "ash", "tide"]
KINDS = ("invented_words", "numbers", "keys", "free_verse", "mixed_languages", "technical_prose")
SENTENCES = [
    "Der Fährmann zählte die Krähen über dem Moor.",
    "La boulangère range ses paniers avant l'aube.",
    "El faro parpadea cuando sube la marea.",
    "Il gatto dorme sul davanzale di pietra.",
    "A chuva lavou o pó das laranjeiras.",
    "De molenaar verloor zijn sleutel in het riet.",
    "Kartka spadła z biurka pod zimny piec.",
    "Kissa katsoo lunta ikkunan takaa.",
    "Skeppet lämnade hamnen utan lanterna.",
    "Az órásmester elejtette a legkisebb rugót.",
    "Yağmur dinince sokak lambaları yandı.",
    "Norii trec repede peste acoperișul gării.",
    "Učitel zapomněl deštník v poslední tramvaji.",
    "Fiskeren solgte sin båt for et gammelt piano.",
    "O navegante desenhou a costa de memória.",
]
PROSE = [
    "Thixotropic slurries recover yield stress logarithmically after shear, so pump restarts must budget for "
    "gelation; a Bingham fit hides this, whereas a structural-kinetics closure exposes the hysteresis loop.",
    "The phase-locked loop's charge pump leaks into its loop filter, folding reference spurs around the carrier; "
    "dead-zone jitter, by contrast, lifts the noise floor inside the closed-loop bandwidth.",
    "Perovskite films crystallise through an intermediate solvate whose rupture sets grain orientation; antisolvent "
    "timing, not spin speed, therefore governs trap density and photoluminescence yield.",
    "Isostatic rebound tilts relict shorelines toward former ice margins, and varve counts anchor that warp in "
    "calendar years; reservoir corrections shift shell dates, biasing uplift histories "
    "unless marine plateaus are modelled.",
    "Lock-free queues reclaim nodes by hazard pointers or epochs: the former bound garbage per thread, the latter "
    "amortise fences, yet a stalled reader pins every retired generation behind its announcement.",
]


def word(rng: random.Random) -> str:
    """A word that no language has."""
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.randrange(2, 4)))


def key(rng: random.Random, length: int) -> str:
    """A random key."""
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz23456789") for _ in range(length))


def questions(seed: int = 11) -> list[dict[str, object]]:
    """The 30 prompts in Spec-Bench's format, five of each kind."""
    rng = random.Random(seed)
    rows: list[dict[str, object]] = []
    for i in range(5 * len(KINDS)):
        kind = KINDS[i // 5]
        if kind == "invented_words":
            shown = ", ".join(word(rng) for _ in range(12))
            turn = f"Go on with this list of invented words, each one new and none of them real: {shown}"
        elif kind == "numbers":
            shown = "\n".join(" ".join(str(rng.randrange(100, 100000)) for _ in range(5)) for _ in range(4))
            turn = f"Continue this table of random numbers by ten more rows:\n{shown}"
        elif kind == "keys":
            shown = "\n".join(f"{word(rng)}: {key(rng, 20)}" for _ in range(6))
            turn = f"Write ten more accounts with a fresh random key each:\n{shown}"
        elif kind == "free_verse":
            first, second, third = rng.sample(IMAGES, 3)
            turn = f"Write free verse about {first}, {second} and a {word(rng)} of {third}; no line and no image twice."
        elif kind == "mixed_languages":
            shown = " ".join(rng.sample(SENTENCES, 5))
            turn = f"Go on for eight sentences, each in another language and about something else: {shown}"
        else:
            turn = f"Go on in this manner for a paragraph, naming no term twice: {PROSE[i % 5]}"
        rows.append({"question_id": 9001 + i, "category": kind, "turns": [turn]})
    return rows


def main() -> None:
    with user_errors():
        write_text(FILE, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in questions()))
        print(FILE)


if __name__ == "__main__":
    main()
