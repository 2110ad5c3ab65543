"""SAM-Decoding with EAGLE-2 against the public code's own trace.

samd_trace.jsonl: one line a turn of the sample bench (prompts and texts are those of official_trace.jsonl), recorded
from github.com/hemingkx/Spec-Bench (commit fd2c1cd, SamdModel.generate, transformers 4.37.1, torch 2.13, float32, one
thread) with the shipped EAGLE head. `sources`: a letter a step, c for a copy and t for a tree. `drafts`: step and
tokens of some drafts, of trees without their parents. In the mode `public` the turns follow each other as the code does
it, which leaves what the head has not read to the next request; in `fresh` that is thrown away.
"""

from model.engine import Target
from model.files import ROOT
from model.methods.trained.samd import Samd
from tests.model.methods.public_traces import EXECUTED, embedded, lines, retaken, watched

TRACE = lines("samd_trace.jsonl")


def check(turns, execution="eager"):
    """Take the turns; returns the drafts that were compared, and the steps."""
    target = Target(embedded())
    compared = 0
    drafter = Samd(target, head_path=str(ROOT / "data/embedded/eagle"))
    drafts = watched(drafter)
    for turn in turns:
        drafts.clear()
        out = retaken(drafter, target, turn, execution)
        assert (
            "".join("t" if draft.source == "eagle2" else "c" for draft in drafts) == turn["sources"]
        ), turn["turn"]
        sizes = {"c": 40, "t": 63}
        assert [step.nodes for step in out.steps] == [1] + [
            sizes[source] for source in turn["sources"]
        ]
        for step, tokens in turn.get("drafts", ()):
            made = drafts[step].tokens.tolist()
            assert (
                made == tokens if turn["sources"][step] == "c" else sorted(made) == sorted(tokens)
            ), step
            compared += 1
    return compared, sum(len(turn["accept_lengths"]) for turn in turns)


@EXECUTED
def test_every_step_and_draft_is_the_public_codes(execution, every):
    turns = [turn for turn in TRACE if turn["mode"] == "fresh"]
    compared, steps = check(turns[::every], execution)
    assert compared >= 10 and (every > 1 or (compared, steps, len(turns)) == (54, 300, 23))
