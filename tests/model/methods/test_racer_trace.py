"""Against what RACER's own code accepted, step by step, with the shipped model on the sample bench.

racer_trace.jsonl: one line a turn, cold, then hot; recorded from github.com/hkr04/RACER by its own loop, LLaMA and
cache (as tested at commit 1ef37ab; transformers 4.52.3, torch 2.13, float32, one thread; capacity 64, at most 200
tokens, no warm-up). Turns and prompts are those of official_trace.jsonl. `accept_lengths` count a step's root and
accepted drafts; every tree has 64 nodes.

The public code takes one more step, with the end of the answer as its root, where that is the target's own next token.
Here the loop is made to take it: it knows no end, and stops a token behind it.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.engine import Target, generate
from model.methods.racer import Racer
from tests.model.recycling.test_official_trace import EOS, ROOT, TRACE, WEIGHTS

LINES = Path(__file__).with_name("racer_trace.jsonl").read_text().splitlines()
RECORDED = {(turn["start"], turn["question_id"]): turn["accept_lengths"] for turn in map(json.loads, LINES)}


@pytest.fixture(scope="module")
def target():
    folder = ROOT / "data/embedded"
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS, "recorded with others"
    return Target(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def answer_of(turn):
    """The recorded answer, which is Token Recycling's, too, up to its end."""
    ids = turn["output_ids"]
    return ids[: ids.index(EOS)] if EOS in ids else ids


@pytest.mark.parametrize("first", [4, pytest.param(56, marks=pytest.mark.slow)])
@pytest.mark.parametrize("start", ["cold", "hot"])
def test_every_length_is_the_recorded_one(target, start, first):
    turns = [turn for turn in TRACE if turn["start"] == start]
    drafter = Racer(target.vocab_size, eos={EOS})
    for turn in turns[:first]:
        recorded, answer = RECORDED[start, turn["question_id"]], [*answer_of(turn), EOS]
        if start == "cold":
            drafter.reset()
        out = generate(target, drafter, turn["prompt_ids"], max_new_tokens=len(answer) + 1)
        assert out.tokens[:-1] == answer
        # the first token, which the prefill gives, is the first root, and counted with it
        assert out.accept_lengths == [1, *recorded], turn["question_id"]
        assert [step.nodes for step in out.steps] == [1] + [64] * len(recorded), turn["question_id"]
    assert len(turns) == 56


def test_an_answer_that_ends_here_has_the_recorded_steps_up_to_its_end(target):
    """By this engine's rule: without the step whose root is the end, which only a hot start can tell later."""
    drafter, ends = Racer(target.vocab_size, eos={EOS}), set()
    for turn in TRACE[3:8]:
        drafter.reset()
        *lengths, last = RECORDED["cold", turn["question_id"]]
        out = generate(target, drafter, turn["prompt_ids"], max_new_tokens=200, eos={EOS})
        assert out.tokens == [*answer_of(turn), EOS]
        assert out.accept_lengths == [1, *lengths] + [last - 1] * (last > 1)
        ends.add(last > 1)
    assert ends == {True, False}, "as a draft that is accepted, and as the target's own next token"
