"""Goose against the public code's own trace, and by hand.

goose_trace.jsonl: one line a turn, the 56 first turns of the sample bench in file order (their prompts and outputs are
those of ../recycling/official_trace.jsonl), recorded from github.com/2kinto/GOOSE_Speculative_Decoding (commit c5c8bb3,
transformers 4.57.3, float32, one thread) with its defaults, at most 200 tokens, EOS 2. Of each step behind the prefill:
the accepted length (accepted and bonus, cut behind EOS), the route (t: tree, s: plain) and the nodes drafted, [spine,
branches]. The prefill commits one token, which is this engine's first step; all other steps are met as they are.
"""

import pytest
import torch

from model.engine import Target, generate
from model.errors import UserError
from model.methods.goose import Goose, GooseSession, Rows
from tests.conftest import toy_model
from tests.model.methods.public_traces import EXECUTED, answered, embedded


@EXECUTED
def test_every_step_is_the_public_codes(execution, every, monkeypatch):
    sizes, draft = [], GooseSession.draft

    def noted(session, root):
        made = draft(session, root)
        sizes.append([session._spine, len(made.tree) - 1 - session._spine])
        return made

    monkeypatch.setattr(GooseSession, "draft", noted)
    target, steps, most = Target(embedded()), 0, 0
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


def test_the_newest_pairs_are_carried_and_within_a_prompt_all_are():
    drafter, target = Goose(61, history_pairs=20), Target(toy_model("llama"))
    generate(target, drafter, [5, 9, 7, 11, 8, 20, 31] * 3, max_new_tokens=30)
    newest = list(drafter.rows.by_pair)[-20:]
    assert len(drafter.rows.by_pair) > 100
    drafter.session().begin([5, 6])
    assert list(drafter.rows.by_pair) == newest
    rows = Rows(61, 1)
    for before in (1, 2, 1):
        rows.write([before], [5], torch.tensor([[7]]), torch.ones(1, 1))
    rows.forget_pairs(1)
    assert list(rows.by_pair) == [61 + 5], "written once more is newer"


def test_settings_and_states_out_of_range_are_refused():
    drafter = Goose(61)
    generate(Target(toy_model("llama")), drafter, [5, 6, 7], max_new_tokens=5)
    state = drafter.state_dict()
    wrong = [
        ({"candidates": torch.zeros(61, 8)}, "saved rows by token are not keys"),
        (
            state | {"pair_ids": state["pair_ids"][:, :8]},
            "rows by pair are not keys with 10 candidates",
        ),
        (state | {"token_scores": state["token_scores"][1:]}, "rows by token are not keys"),
        (state | {"token_ids": state["token_ids"] + 61}, "token ids outside the vocabulary of"),
        (state | {"pair_keys": state["pair_keys"] + 61**2}, "token ids outside the vocabulary of"),
    ]
    for broken, message in wrong:
        with pytest.raises(UserError, match=message):
            drafter.load_state_dict(broken)
    before = drafter.state_dict()
    assert all(torch.equal(before[name], state[name]) for name in state), (
        "what was refused has changed nothing"
    )
