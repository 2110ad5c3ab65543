"""Held-out benches and the training stream, which shares no question with them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import count

from tools.embedded.dialogue import Dialogue
from tools.embedded.tasks import MAKERS, MT_BENCH, SINGLE

TRAINING_SEED = 20240816
# Easy dialogues come first and grow rarer: copying and word alignment form much sooner in a short context.
EASY_UNTIL = 10000
EASY_AFTER = 0.1

# How often a category is drawn for training, by how hard it is and how often a bench asks it.
WEIGHTS = {
    "writing": 2.5,
    "roleplay": 1.5,
    "reasoning": 2.5,
    "math": 2.5,
    "coding": 1.5,
    "extraction": 5.0,
    "stem": 1.0,
    "humanities": 1.0,
    "translation": 5.0,
    "summarization": 7.0,
    "qa": 2.5,
    "math_reasoning": 6.0,
    "rag": 6.0,
    "code": 3.0,
}


def _bench(rng: random.Random, per_subtask: int, taken: set[str]) -> list[Dialogue]:
    """Dialogues in Spec-Bench's order with new first questions, which join `taken`."""
    labels = [c for i in range(per_subtask) for c in [sorted(MT_BENCH, key=list(MT_BENCH).index)[i % 8]]]
    labels = sorted(labels, key=list(MT_BENCH).index)
    labels += [c for c in SINGLE for _ in range(per_subtask)]
    bench = []
    for label in labels:
        dialogue = MAKERS[label](rng)
        while dialogue.turns[0] in taken:
            dialogue = MAKERS[label](rng)
        taken.add(dialogue.turns[0])
        bench.append(dialogue)
    return bench


@cache
def held_out() -> dict[str, tuple[Dialogue, ...]]:
    """Three disjoint benches: `sample` (56), `warmup` (2) and `large` (210)."""
    taken: set[str] = set()
    warmup = _bench(random.Random(1), 1, taken)
    return {
        "warmup": (warmup[0], warmup[-1]),
        "sample": tuple(_bench(random.Random(2), 8, taken)),
        "large": tuple(_bench(random.Random(3), 30, taken)),
    }


def held_out_questions() -> frozenset[str]:
    """The first question of every held-out dialogue; with it the whole dialogue stays out of the corpus."""
    return frozenset(d.turns[0] for bench in held_out().values() for d in bench)


def training(seed: int = TRAINING_SEED, easy_until: int = EASY_UNTIL) -> Iterator[Dialogue]:
    """Training dialogues without end."""
    rng = random.Random(seed)
    excluded = held_out_questions()
    categories, weights = list(WEIGHTS), list(WEIGHTS.values())
    for i in count():
        easy = rng.random() < max(EASY_AFTER, 1 - i / easy_until)
        dialogue = MAKERS[rng.choices(categories, weights)[0]](rng, easy)
        if dialogue.turns[0] not in excluded:
            yield dialogue
