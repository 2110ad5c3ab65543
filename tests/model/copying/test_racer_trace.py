"""Against what RACER's own code accepted, step by step, with the shipped model on the sample bench.

racer_trace.jsonl: one line a turn and state of the code, cold, then hot; recorded from github.com/hkr04/RACER by its
own loop, LLaMA and cache (`april`: commit fc494a3; `refill`: as tested at 1ef37ab; transformers 4.52.3, torch 2.13,
float32, one thread; capacity 64, at most 200 tokens, no warm-up). Turns and prompts are those of official_trace.jsonl.
`accept_lengths` count a step's root and accepted drafts; `nodes` its tree, 64 where they are not given; `trees` are
hashes of three turns' trees. Nothing was recorded of `paper`.

The public code takes one more step, with the end of the answer as its root, where that is the target's own next token.
Here the loop is made to take it: it knows no end, and stops a token behind it.

Rounding moves near ties of candidates (gaps of 5e-6), and in float32 a node of one tree here. So `april` is run in
float64, where no length and no tree of the record is another one. The trees of `refill` always have 64 nodes.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.copying.racer import Racer
from model.decoding import Target, generate
from tests.model.recycling.test_official_trace import EOS, ROOT, TRACE, WEIGHTS
from tests.model.sessions import each_session

LINES = Path(__file__).with_name("racer_trace.jsonl").read_text().splitlines()
RECORDED = {(turn["version"], turn["start"], turn["question_id"]): turn for turn in map(json.loads, LINES)}


@pytest.fixture(scope="module")
def targets():
    folder = ROOT / "data/embedded"
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS, "recorded with others"
    dtypes = {"april": torch.float64, "refill": torch.float32}
    return {
        version: Target(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
        for version, dtype in dtypes.items()
    }


def hashed(drafter):
    """The hash of every tree that is drafted."""
    hashes = []

    def note(session):
        draft = session.draft

        def noted(root):
            found = draft(root)
            shown = json.dumps([found.tokens.tolist(), found.tree.parent_of])
            hashes.append(hashlib.sha256(shown.encode()).hexdigest()[:12])
            return found

        session.draft = noted

    each_session(drafter, note)
    return hashes


def answer_of(turn):
    """The recorded answer, which is Token Recycling's, too, up to its end."""
    ids = turn["output_ids"]
    return ids[: ids.index(EOS)] if EOS in ids else ids


@pytest.mark.parametrize("first", [10, pytest.param(56, marks=pytest.mark.slow)])
@pytest.mark.parametrize("start", ["cold", "hot"])
@pytest.mark.parametrize("version", ["april", "refill"])
def test_every_length_and_every_tree_is_the_recorded_one(targets, version, start, first):
    target, turns = targets[version], [turn for turn in TRACE if turn["start"] == start]
    drafter = Racer(target.vocab_size, version=version, eos={EOS})
    hashes, trees = hashed(drafter), 0
    for turn in turns[:first]:
        recorded, answer = RECORDED[version, start, turn["question_id"]], [*answer_of(turn), EOS]
        if start == "cold":
            drafter.reset()
        hashes.clear()
        out = generate(target, drafter, turn["prompt_ids"], max_new_tokens=len(answer) + 1)
        assert out.tokens[:-1] == answer
        # the first token, which the prefill gives, is the first root, and counted with it
        assert out.accept_lengths == [1, *recorded["accept_lengths"]], turn["question_id"]
        sizes = [step.nodes for step in out.steps]
        assert sizes == [1, *recorded.get("nodes", [64] * len(hashes))], turn["question_id"]
        if "trees" in recorded:
            assert hashes == recorded["trees"]
            trees += 1
    assert len(turns) == 56
    if first == len(turns):
        assert trees == {"april cold": 1, "april hot": 2}.get(f"{version} {start}", 0)


@pytest.mark.parametrize("version", ["april", "refill"])
def test_an_answer_that_ends_here_has_the_recorded_steps_up_to_its_end(targets, version):
    """By this engine's rule: without the step whose root is the end, which only a hot start can tell later."""
    target, ends = targets["refill"], set()
    drafter = Racer(target.vocab_size, version=version, eos={EOS})
    for turn in TRACE[3:8]:
        drafter.reset()
        *lengths, last = RECORDED[version, "cold", turn["question_id"]]["accept_lengths"]
        out = generate(target, drafter, turn["prompt_ids"], max_new_tokens=200, eos={EOS})
        assert out.tokens == [*answer_of(turn), EOS]
        assert out.accept_lengths == [1, *lengths] + [last - 1] * (last > 1)
        ends.add(last > 1)
    assert ends == {True, False}, "as a draft that is accepted, and as the target's own next token"
