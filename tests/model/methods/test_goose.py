"""Goose against the public code's own trace, and which pairs it keeps.

goose_trace.jsonl: one line a turn, the 56 first turns of the sample bench in file order (their prompts and outputs are
those of ../recycling/official_trace.jsonl), recorded from github.com/2kinto/GOOSE_Speculative_Decoding (commit c5c8bb3,
transformers 4.57.3, float32, one thread) with its defaults, at most 200 tokens, EOS 2. Of each step behind the prefill:
the accepted length (accepted and bonus, cut behind EOS), the route (t: tree, s: plain) and the nodes drafted, [spine,
branches]. The prefill commits one token, which is this engine's first step; all other steps are met as they are.
"""

from model.engine import Target
from model.methods.rivals.goose import Goose, GooseSession
from tests.model.methods.public_traces import EXECUTED, answered, embedded


@EXECUTED
def test_every_step_is_the_public_codes(execution, every, monkeypatch):
    sizes = []
    draft = GooseSession.draft

    def noted(session, root):
        made = draft(session, root)
        sizes.append([session._spine, len(made.tree) - 1 - session._spine])
        return made

    monkeypatch.setattr(GooseSession, "draft", noted)
    target = Target(embedded())
    steps = 0
    most = 0
    for turn, out in answered(
        Goose(target.vocab_size), target, "goose_trace.jsonl", every, execution
    ):
        assert out.accept_lengths == [1, *turn["accept_lengths"]], turn["question_id"]
        assert sizes == turn["nodes"], turn["question_id"]
        assert ["ts"[sum(size) == 0] for size in sizes] == list(turn["routes"])
        assert [step.nodes for step in out.steps] == [1, *(1 + sum(size) for size in turn["nodes"])]
        steps, most = steps + len(sizes), max(most, *map(sum, sizes))
        sizes.clear()
    assert every > 1 or (steps, most) == (1912, 95)
