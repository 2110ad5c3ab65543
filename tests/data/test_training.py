"""The embedded model, how it was trained, its corpus, its judge, and the files that are written from the corpus."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data.embedded.training import check, corpus
from data.embedded.training import train as training_
from data.embedded.training.check import same_behaviour
from data.embedded.training.corpus import held_out, held_out_questions, training
from data.embedded.training.dialogue import prompt
from data.embedded.training.tokenizer import CHAT
from data.embedded.training.train import Recipe, build_tokenizer, train

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "data" / "embedded"
SAMPLE = ROOT / "data" / "sample"
HELD_OUT = [d for bench in held_out().values() for d in bench]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


# --- the judge


@pytest.mark.parametrize(
    "body",
    [
        "import os\n    return 0",
        "return numbers.__class__",
        "return open('x')",
        "return __import__('os')",
        "return eval('0')",
        "while True:\n        pass",
        "return 9 ** 9 ** 9",
    ],
)
def test_code_that_could_do_harm_does_not_pass(body: str) -> None:
    reference = "```python\ndef f(numbers):\n    return 0\n```"
    assert not same_behaviour(reference, f"```python\ndef f(numbers):\n    {body}\n```")


# --- the corpus and the sample


def test_corpus_is_what_the_weights_were_trained_on() -> None:
    rows = [dialogue.row(i) for i, dialogue in enumerate(islice(training(), 2000))]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == "9d2331226e69afa9"


@pytest.mark.parametrize("count", [6000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_no_held_out_question_is_trained_on(count: int) -> None:
    """Without the filter the first of them would come as dialogue 1819."""
    questions = held_out_questions()
    assert len(questions) == len(HELD_OUT) == 268
    assert not any(d.turns[0] in questions for d in islice(training(), count))


def test_shipped_files_are_what_the_command_writes(tmp_path: Path) -> None:
    corpus.main(["--output", str(tmp_path)])
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert written == ["embedded/datastore.bin", "sample/question.jsonl", "sample/warmup.jsonl"]
    for name in written:
        assert (tmp_path / name).read_bytes() == (ROOT / "data" / name).read_bytes(), name


# --- encoding


# --- training


def test_training_repeats_exactly(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_, "POOL", 64)
    recipe = Recipe(steps=3, batch_tokens=512, hidden=48, heads=2, layers=2, intermediate=64)
    one, two = (train(recipe, tokenizer).state_dict() for _ in range(2))
    torch.set_num_threads(1)  # which training fixes, as it does the process's algorithms
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_shipped_tokenizer_is_what_the_corpus_gives(tokenizer: Tokenizer) -> None:
    assert build_tokenizer().to_str() == tokenizer.to_str()


# --- the shipped model


def test_the_chat_template_is_the_one_of_training() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    assert tokenizer.chat_template == CHAT
    chat = [
        {"role": "user", "content": "Hi you"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And?"},
    ]
    for turns, answers in ((["Hi you"], []), (["Hi you", "And?"], ["Yes."])):
        said = chat[: len(turns) + len(answers)]
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        assert ids == tokenizer(prompt(turns, answers))["input_ids"]


@pytest.mark.parametrize(
    ("categories", "wrong"),
    [
        (("rag", "code"), 0),
        pytest.param(
            ("stem", "translation", "summarization", "qa", "rag", "code"), 2, marks=pytest.mark.slow
        ),
    ],
)
def test_model_answers(categories: tuple[str, ...], wrong: int) -> None:
    """One question a subtask; the measured shares are in the model's README."""
    rows = check.read_lines(SAMPLE / "question.jsonl")
    chosen = {row["category"]: row for row in reversed(rows)}
    turns = check.measure(MODEL, [chosen[c] for c in categories])
    assert sum(t.right for t in turns) >= len(turns) - wrong
    assert sum(bool(t.ended) for t in turns) >= len(turns) - min(wrong, 1)
