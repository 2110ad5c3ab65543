"""Cacheback: tables against plain lists, drafts against their definition, state that resumes exactly."""

import random

import pytest
import torch

from model.errors import UserError
from model.methods.ngram_cache import NgramCache, best_slots
from model.structures.ngram_table import NgramTable

VOCAB = 61


def slow_rows(texts, leader, follower, capacity, followers):
    """The table by replaying all n-grams on lists: [leader, followers latest first], oldest leader first."""
    rows = []
    for text in texts:
        for end in range(leader + follower, len(text) + 1):
            gram = tuple(text[end - follower : end])
            lead = tuple(text[end - follower - leader : end - follower])
            old = [row for row in rows if row[0] == lead]
            rows = [row for row in rows if row[0] != lead]
            kept = [gram] + [other for other in (old[0][1] if old else []) if other != gram]
            rows = [*rows, [lead, kept[:followers]]][-capacity:]
    return rows


def rows_of(table):
    """What `state_dict` says, as lists."""
    state = {name: tensor.tolist() for name, tensor in table.state_dict().items()}
    grams = iter(map(tuple, state["followers"]))
    return [
        [tuple(lead), [next(grams) for _ in range(n)]]
        for lead, n in zip(state["leaders"], state["counts"], strict=True)
    ]


@pytest.mark.parametrize(
    "leader, follower, capacity, followers",
    [(1, 3, 4, 2), (2, 2, 9, 3), (1, 1, 100, 1), (3, 2, 5, 8)],
)
def test_the_table_is_that_of_plain_lists(leader, follower, capacity, followers):
    rng = random.Random(leader + capacity)
    texts = [[rng.randrange(5) for _ in range(rng.randrange(40))] for _ in range(12)]
    table = NgramTable(leader, follower, capacity=capacity, followers=followers)
    for i, text in enumerate(texts):
        table.add_text(text)
        assert rows_of(table) == slow_rows(texts[: i + 1], leader, follower, capacity, followers)


@pytest.mark.parametrize("leader, follower, nodes", [(1, 3, 24), (2, 2, 9), (1, 1, 16), (3, 1, 5)])
def test_a_draft_holds_what_the_table_says(leader, follower, nodes):
    """Each slot of the draft, looked up one by one in the plain lists of all the text before."""
    rng = random.Random(0)
    drafter = NgramCache(
        VOCAB, leader=leader, follower=follower, capacity=9, followers=3, nodes=nodes
    )
    texts = []
    for _ in range(4):
        text = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
        session = drafter.session()
        session.begin(list(text))
        texts.append(text)
        for _ in range(8):
            draft = session.draft(text[-1])
            rows = dict(slow_rows(texts, leader, follower, 9, 3))
            due = len(rows.get(tuple(text[-leader:]), []))
            path_of = {path: node for node, path in enumerate(draft.tree.rank_paths)}
            slots = best_slots(nodes // follower, due, 3)
            assert len(draft.tree) == 1 + follower * len(slots) <= 1 + nodes
            said = {(): list(text)}  # what the text is where a slot ends
            for slot in slots:
                before = said[slot[:-1]]
                grams = rows.get(tuple(before[-leader:]), [])
                gram = grams[slot[-1]] if slot[-1] < len(grams) else (before[-1],) * follower
                said[slot] = [*before, *gram]
                end = path_of[tuple(r for rank in slot for r in (rank, *[0] * (follower - 1)))]
                assert (
                    draft.tokens[draft.tree.chain_of[end][1:]].tolist() == said[slot][len(text) :]
                )
            new = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
            text += new
            session.account(type("Outcome", (), {"tokens": new})())


def test_states_that_do_not_fit_are_refused():
    drafter = NgramCache(VOCAB, capacity=4, followers=2)
    drafter.session().begin([1, 2, 3, 4, 5, 6])
    good = drafter.state_dict()
    for broken in (
        {"candidates": torch.zeros(2, 2)},
        good | {"followers": good["followers"] + VOCAB},
        good | {"counts": good["counts"] + 1},
        good | {"followers": good["followers"][:, :2]},
        good | {"leaders": good["leaders"][1:]},
    ):
        with pytest.raises(UserError, match="start: the saved n-gram table"):
            drafter.load_state_dict(broken)
    with pytest.raises(UserError, match="at most 1 leaders"):
        NgramCache(VOCAB, capacity=1).load_state_dict(good)
    drafter.load_state_dict(good)
    assert rows_of(drafter.table) == [[(1,), [(2, 3, 4)]], [(2,), [(3, 4, 5)]], [(3,), [(4, 5, 6)]]]
