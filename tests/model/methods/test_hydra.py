"""Hydra against the public code's own trace.

hydra_trace.jsonl: one line a turn of the sample bench (prompts and texts are those of
official_trace.jsonl), recorded from github.com/hemingkx/Spec-Bench (commit fd2c1cd, model/hydra,
transformers 4.53.1, torch 2.13, float32, one thread) with the shipped heads and mc_sim_7b_63.
`drafts`: step and tokens of some drafts, in the order of the nodes.
"""

from model.engine import Target
from model.files import ROOT
from model.methods.trained.hydra import Hydra
from tests.model.methods.public_traces import EXECUTED, embedded, lines, retaken, watched


@EXECUTED
def test_every_step_and_draft_is_the_public_codes(execution, every):
    target = Target(embedded())
    drafter = Hydra(target, hydra_path=str(ROOT / "data/embedded/hydra"))
    drafts = watched(drafter)
    seen = 0
    steps = 0
    for turn in lines("hydra_trace.jsonl")[::every]:
        drafts.clear()
        out = retaken(drafter, target, turn, execution)
        assert [step.nodes for step in out.steps] == [1] + [64] * len(turn["accept_lengths"])
        steps += len(turn["accept_lengths"])
        for step, tokens in turn.get("drafts", ()):
            assert drafts[step].tokens.tolist() == tokens, step
            seen += 1
    assert seen >= 10
    assert every > 1 or (seen, steps) == (27, 409)
