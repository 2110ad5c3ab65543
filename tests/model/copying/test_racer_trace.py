"""Against what RACER's own code accepted, step by step, with the shipped model on the sample bench.

racer_trace.jsonl: one line a turn and state of the code, cold, then hot; recorded from github.com/hkr04/RACER by its own
loop, LLaMA and cache (`april`: commit fc494a3; `refill`: as tested at 1ef37ab; transformers 4.52.3, torch 2.13, float32,
one thread; capacity 64, at most 200 tokens, no warm-up). The turns and prompts are those of official_trace.jsonl.
`accept_lengths` count a step's root and accepted drafts; `nodes` its tree, 64 where they are not given; `trees` are
hashes of three turns' trees. Nothing was recorded of `paper`.

The public code takes one more step, with the end of the answer as its root, where that is the target's own next token.
Here the loop is made to take it: it knows no end, and stops a token behind it. Rounding moves near ties of candidates
(gaps of 5e-6), and so a node of 3 trees; in float64 there are none, and no length or tree of the record is another one.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.copying.racer import Racer
from model.decoding import Target, generate
from model.decoding.shared_text import generate_together
from tests.model.recycling.test_official_trace import EOS, ROOT, TRACE, WEIGHTS
from tests.model.sessions import each_session

VERSIONS = ("april", "refill")
LINES = Path(__file__).with_name("racer_trace.jsonl").read_text().splitlines()
RECORDED = {(turn["version"], turn["start"], turn["question_id"]): turn for turn in map(json.loads, LINES)}


@pytest.fixture(scope="module")
def target():
    folder = ROOT / "data/embedded"
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS, "recorded with others"
    return Target(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval())


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


@pytest.mark.parametrize("start", ["cold", "hot"])
def test_every_length_and_every_tree_is_the_recorded_one(target, start):
    turns = [turn for turn in TRACE if turn["start"] == start]
    drafters = [Racer(target.vocab_size, version=version, eos={EOS}) for version in VERSIONS]
    hashes, trees = hashed(drafters[0]), 0
    for turn in turns:
        prompt, answer, question = turn["prompt_ids"], [*answer_of(turn), EOS], turn["question_id"]
        hashes.clear()
        if start == "cold":
            for drafter in drafters:
                drafter.reset()
        outs = generate_together(target, drafters, prompt, max_new_tokens=len(answer) + 1)
        for version, out in zip(VERSIONS, outs, strict=True):
            recorded = RECORDED[version, start, question]
            assert out.tokens[:-1] == answer
            # the first token, which the prefill gives, is the first root, and counted with it
            assert out.accept_lengths == [1, *recorded["accept_lengths"]], (version, question)
            sizes = [step.nodes for step in out.steps]
            assert sizes == [1, *recorded.get("nodes", [64] * (len(sizes) - 1))], (version, question)
        found = RECORDED["april", start, question].get("trees", hashes)
        assert hashes == found
        trees += found is not hashes
    assert len(turns) == 56 and trees == {"cold": 1, "hot": 2}[start]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_answer_that_ends_here_has_the_recorded_steps_up_to_its_end(target, version):
    """By this engine's rule: without the step whose root is the end, which only a hot start can tell later."""
    drafter, without = Racer(target.vocab_size, version=version, eos={EOS}), 0
    for turn in TRACE[:12]:
        drafter.reset()
        lengths = RECORDED[version, "cold", turn["question_id"]]["accept_lengths"]
        out = generate(target, drafter, turn["prompt_ids"], max_new_tokens=200, eos={EOS})
        assert out.tokens == [*answer_of(turn), EOS]
        assert out.accept_lengths == [1, *lengths[:-1]] + [lengths[-1] - 1] * (lengths[-1] > 1)
        without += lengths[-1] == 1
    assert 0 < without < 12, "both ways of ending"
