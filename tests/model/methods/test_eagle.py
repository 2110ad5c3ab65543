"""EAGLE-3 against the public code's own trace, and heads of 16-bit targets.

eagle3_trace.jsonl: one line a turn of the sample bench (prompts and texts are those of
official_trace.jsonl) and setting, recorded from github.com/SafeAILab/EAGLE (commit cb7e084,
transformers 4.53.1, torch 2.13, float32, one thread) with the shipped head. The public code cannot
read three states of four layers, so it ran on the shipped model with three layers put in that
change nothing, where its own rule finds the states that config.json names here. `drafts`: step,
tokens and parents of some drafts, root first. `total_token` counts the root, `depth` one level less
than here.
"""

import math

import pytest
import torch

from model.engine import Target, generate
from model.files import ROOT
from model.methods.trained.eagle import Eagle2, Eagle3
from tests.conftest import greedy, toy_model
from tests.model.methods.heads import write_eagle
from tests.model.methods.public_traces import (
    EXECUTED,
    embedded,
    lines,
    paths_of,
    retaken,
    watched,
)


@EXECUTED
def test_every_step_and_draft_is_the_public_codes(execution, every):
    target = Target(embedded())
    seen = 0
    steps = 0
    for setting in ((60, 7, 10), (24, 5, 8)):
        nodes, depth, top_k = setting
        sizes = dict(depth=depth + 1, top_k=top_k, nodes=nodes - 1)
        drafter = Eagle3(target, eagle3_path=str(ROOT / "data/embedded/eagle3"), **sizes)
        drafts = watched(drafter)
        turns = [
            turn
            for turn in lines("eagle3_trace.jsonl")
            if (turn["total_token"], turn["depth"], turn["top_k"]) == setting
        ]
        for turn in turns[::every]:
            drafts.clear()
            out = retaken(drafter, target, turn, execution)
            assert [step.nodes for step in out.steps] == [1] + [nodes] * len(turn["accept_lengths"])
            steps += len(turn["accept_lengths"])
            for step, tokens, parents in turn.get("drafts", ()):
                ours = paths_of(drafts[step].tokens.tolist(), drafts[step].tree.parent_of)
                assert ours == paths_of(tokens, parents), step
                seen += 1
    assert seen >= 3
    assert every > 1 or (seen, steps) == (60, 766)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_of_16_bit_targets(tmp_path, dtype):
    """Log-probs are not rounded; NaNs end no answer."""
    model = toy_model("llama-grouped", dtype=dtype)
    target = Target(model)
    folder = write_eagle(tmp_path, model)
    # in 16 bits the log-probs of all but token 7 are equal
    shallow = Eagle2(target, head_path=folder, depth=1, top_k=2, nodes=2)
    logits = torch.zeros(61, dtype=dtype)
    logits[7] = 8.0
    logits[50] = 0.01
    shallow.lm_head = lambda features: logits.expand(len(features), 61)
    drafts = watched(shallow)
    generate(target, shallow, [5, 9], max_new_tokens=4)
    assert all(draft.tokens[1:].tolist() == [7, 50] for draft in drafts)

    drafter = Eagle2(target, head_path=folder, nodes=20)
    lm_head = drafter.lm_head
    factors = iter([1.0, math.nan] * 1000)
    drafter.lm_head = lambda features: lm_head(features) * next(factors)
    prompt = [5, 9, 33, 12]
    out = generate(target, drafter, prompt, max_new_tokens=20)
    assert out.tokens == greedy(model, prompt, 20)
