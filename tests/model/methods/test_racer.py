"""RACER: against the public code's own trace, and what its trie holds where an answer ends.

racer_trace.jsonl: one line a turn, cold, then hot; recorded from github.com/hkr04/RACER by its own loop, LLaMA and
cache (as tested at commit 1ef37ab; transformers 4.52.3, torch 2.13, float32, one thread; capacity 64, at most 200
tokens, no warm-up). Turns and prompts are those of official_trace.jsonl. `accept_lengths` count a step's root and
accepted drafts; every tree has 64 nodes.

The public code takes one more step, with the end of the answer as its root, where that is the target's own next token.
Here the loop is made to take it: it knows no end, and stops a token behind it.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from model.engine import Target, generate
from model.methods.rivals.racer import Racer
from tests.conftest import greedy, toy_model
from tests.model.methods.public_traces import EOS, TRACE, embedded

V = 61


def test_what_is_accepted_behind_the_end_is_not_inserted_and_the_end_is():
    """The end as a draft that is accepted, and as the target's own next token, which no step has as
    its root.
    """
    model = toy_model("llama")
    target = Target(model)
    prompt = [5, 6, 7, 8]
    answer = greedy(model, prompt, 30)
    for end in {token for token in answer[2:] if answer.index(token) > 1}:
        text = prompt + answer[: answer.index(end) + 1]
        drafter = Racer(V, ngram=2, eos={end})
        for _ in range(2):  # then the answer is retrieved, and accepted to its end and beyond
            generate(target, drafter, prompt, max_new_tokens=30, eos={end})
            first = drafter.trie.root.children.values()
            pairs = {(node.token, after) for node in first for after in node.children}
            assert pairs == set(pairwise(text))


LINES = Path(__file__).with_name("racer_trace.jsonl").read_text().splitlines()
RECORDED = {
    (turn["start"], turn["question_id"]): turn["accept_lengths"] for turn in map(json.loads, LINES)
}


def answer_of(turn):
    """The recorded answer, which is Token Recycling's, too, up to its end."""
    ids = turn["output_ids"]
    return ids[: ids.index(EOS)] if EOS in ids else ids


@pytest.mark.parametrize("first", [3, pytest.param(56, marks=pytest.mark.slow)])
@pytest.mark.parametrize("start", ["cold", "hot"])
def test_every_length_is_the_recorded_one(start, first):
    turns = [turn for turn in TRACE if turn["start"] == start]
    target = Target(embedded())
    drafter = Racer(target.vocab_size, eos={EOS})
    for turn in turns[:first]:
        recorded = RECORDED[start, turn["question_id"]]
        answer = [*answer_of(turn), EOS]
        if start == "cold":
            drafter.reset()
        out = generate(target, drafter, turn["prompt_ids"], max_new_tokens=len(answer) + 1)
        assert out.tokens[:-1] == answer
        # the first token, which the prefill gives, is the first root, and counted with it
        assert out.accept_lengths == [1, *recorded], turn["question_id"]
        assert [step.nodes for step in out.steps] == [1] + [64] * len(recorded), turn["question_id"]
    assert len(turns) == 56
