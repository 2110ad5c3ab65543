"""The training stream and the held-out benches, which share no question; and the files that are written from them.

`python -m data.embedded.training.corpus` writes the sample bench and the datastore from which `method=rest` drafts.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import count, islice
from pathlib import Path

from evaluation.errors import user_errors
from model.files import ROOT, write_text
from tools.datastore import build, load_tokenizer

from . import facts, problems, texts
from .dialogue import Dialogue, Task

TRAINING_SEED = 20240816
# Easy dialogues come first and grow rarer: copying and word alignment form much sooner in a short context.
EASY_UNTIL = 10000
EASY_AFTER = 0.1

# Of each category its task, and how often it is drawn for training, by how hard it is and how often a bench asks it.
# First the eight labels that Spec-Bench reports together as mt_bench, in its order.
MT_BENCH: dict[str, tuple[Task, float]] = {
    "writing": (texts.writing, 2.5),
    "roleplay": (facts.roleplay, 1.5),
    "reasoning": (problems.reasoning, 2.5),
    "math": (problems.math, 2.5),
    "coding": (problems.coding, 1.5),
    "extraction": (texts.extraction, 5.0),
    "stem": (facts.stem, 1.0),
    "humanities": (facts.humanities, 1.0),
}
SINGLE: dict[str, tuple[Task, float]] = {
    "translation": (texts.translation, 5.0),
    "summarization": (texts.summarization, 7.0),
    "qa": (facts.qa, 2.5),
    "math_reasoning": (problems.math_reasoning, 6.0),
    "rag": (texts.rag, 6.0),
    "code": (problems.code, 3.0),
}
TASKS: dict[str, Task] = {category: task for category, (task, _) in (MT_BENCH | SINGLE).items()}
WEIGHTS = [weight for _, weight in (MT_BENCH | SINGLE).values()]

SAMPLE = {"question.jsonl": ("sample", 1), "warmup.jsonl": ("warmup", 9001)}  # file: bench, first question id
DATASTORE_DIALOGUES = 230
DATASTORE_SEED = 31108252  # other dialogues than the model's training begins with; easy ones are as rare as at its end


def _bench(seed: int, per_subtask: int, taken: set[str]) -> list[Dialogue]:
    """Dialogues in Spec-Bench's order with new first questions, which join `taken`."""
    rng, labels = random.Random(seed), list(MT_BENCH)
    categories = sorted((labels[i % len(labels)] for i in range(per_subtask)), key=labels.index)
    bench = []
    for category in categories + [c for c in SINGLE for _ in range(per_subtask)]:
        dialogue = TASKS[category](rng)
        while dialogue.turns[0] in taken:
            dialogue = TASKS[category](rng)
        taken.add(dialogue.turns[0])
        bench.append(dialogue)
    return bench


@cache
def held_out() -> dict[str, tuple[Dialogue, ...]]:
    """Three disjoint benches: `sample` (56), `warmup` (2) and `large` (210)."""
    taken: set[str] = set()
    warmup = _bench(1, 1, taken)
    return {
        "warmup": (warmup[0], warmup[-1]),
        "sample": tuple(_bench(2, 8, taken)),
        "large": tuple(_bench(3, 30, taken)),
    }


def held_out_questions() -> frozenset[str]:
    """The first question of every held-out dialogue; with it the whole dialogue stays out of the corpus."""
    return frozenset(d.turns[0] for bench in held_out().values() for d in bench)


def training(seed: int = TRAINING_SEED, easy_until: int = EASY_UNTIL) -> Iterator[Dialogue]:
    """Training dialogues without end."""
    rng = random.Random(seed)
    excluded = held_out_questions()
    tasks = list(TASKS.values())
    for i in count():
        easy = rng.random() < max(EASY_AFTER, 1 - i / easy_until)
        dialogue = rng.choices(tasks, WEIGHTS)[0](rng, easy)
        if dialogue.turns[0] not in excluded:
            yield dialogue


def sample_files() -> dict[str, str]:
    """The text of each file of the sample bench, in Spec-Bench's format."""
    return {
        file: "".join(json.dumps(d.row(first + i), ensure_ascii=False) + "\n" for i, d in enumerate(held_out()[bench]))
        for file, (bench, first) in SAMPLE.items()
    }


def datastore_texts() -> Iterator[list[str]]:
    """The datastore's documents. The template ends each answer, so the last end-of-sequence token is left out."""
    for dialogue in islice(training(DATASTORE_SEED, easy_until=1), DATASTORE_DIALOGUES):
        yield [dialogue.text().removesuffix("</s>")]


def main(arguments: list[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(prog="python -m data.embedded.training.corpus", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "data", help="folder to write to (default: data/)")
    with user_errors():
        options = parser.parse_args(arguments)
        for file, text in sample_files().items():
            write_text(options.output / "sample" / file, text)
            print(f"{options.output / 'sample' / file}: {text.count(chr(10))} questions")
        tokenizer = load_tokenizer(str(ROOT / "data/embedded"))
        build(*tokenizer, datastore_texts(), options.output / "embedded/datastore.bin")


if __name__ == "__main__":
    main()
