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
    "leader, follower, capacity, followers", [(1, 3, 4, 2), (2, 2, 9, 3), (1, 1, 100, 1), (3, 2, 5, 8)]
)
def test_the_table_is_that_of_plain_lists(leader, follower, capacity, followers):
    rng = random.Random(leader + capacity)
    texts = [[rng.randrange(5) for _ in range(rng.randrange(40))] for _ in range(12)]
    table = NgramTable(leader, follower, capacity=capacity, followers=followers)
    for i, text in enumerate(texts):
        table.add_text(text)
        assert rows_of(table) == slow_rows(texts[: i + 1], leader, follower, capacity, followers)


def test_what_was_not_seen_for_longest_goes_first():
    table = NgramTable(1, 1, capacity=2, followers=2)
    table.add_text([7, 8])  # 7: 8
    table.add_text([8, 9])
    table.add_text([7, 5])  # 7 is seen again, so 8 is the oldest leader
    assert table.followers_of((7,)) == [(5,), (8,)]
    table.add_text([7, 8])  # 8 comes first again
    table.add_text([7, 6])  # the third follower: 5, seen longest ago, goes
    assert table.followers_of((7,)) == [(6,), (8,)]
    assert table.followers_of((8,)) == [(9,)]  # looking is no use
    table.add_text([1, 2])  # the third leader: 8 goes
    assert table.followers_of((8,)) == [] and len(table._rows) == 2


def test_slots_by_hand():
    # 0.25 / (rank + 1) along the way: (0,) .25, (1,) .125, (2,) .083; (0, 0) .0625, (0, 1) and (1, 0) .031
    assert best_slots(5, 3, 8)[:4] == [(0,), (1,), (2,), (0, 0)]
    assert set(best_slots(6, 3, 8)) == {(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)}
    assert best_slots(3, 1, 8) == [(0,), (0, 0), (0, 1)] and best_slots(3, 0, 8) == []


def test_a_draft_by_hand():
    drafter = NgramCache(VOCAB, follower=2, nodes=6)
    session = drafter.session()
    session.begin([5, 1, 2, 5, 3, 4, 3, 9, 9, 5])  # followers of 5: (3, 4), then (1, 2); of 4: (3, 9)
    draft = session.draft(5)
    found = {tuple(draft.tokens[chain[1:]].tolist()) for chain in draft.tree.chain_of}
    assert found == {(), (3,), (3, 4), (1,), (1, 2), (3, 4, 3), (3, 4, 3, 9)}  # slots (0,), (1,), (0, 0)
    assert drafter.session().begin([8, 1]).tokens.tolist() == [1]  # the prefill drafts nothing
    assert NgramCache(VOCAB).session().begin([5]).tokens.tolist() == [5]


@pytest.mark.parametrize("leader, follower, nodes", [(1, 3, 24), (2, 2, 9), (1, 1, 16), (3, 1, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_a_draft_holds_what_the_table_says(seed, leader, follower, nodes):
    """Each slot of the draft, looked up one by one in the plain lists of all the text before."""
    rng = random.Random(seed)
    drafter = NgramCache(VOCAB, leader=leader, follower=follower, capacity=9, followers=3, nodes=nodes)
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
                assert draft.tokens[draft.tree.chain_of[end][1:]].tolist() == said[slot][len(text) :]
            new = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
            text += new
            session.account(type("Outcome", (), {"tokens": new})())


def test_memory_does_not_grow_with_the_text():
    rng = random.Random(0)
    drafter = NgramCache(VOCAB, leader=2, capacity=50)
    session = drafter.session()
    session.begin([rng.randrange(VOCAB) for _ in range(3000)])
    assert len(session._recent) == 4 and len(drafter.table._rows) == 50
    assert all(tensor.numel() <= 50 * 8 * 3 for tensor in drafter.state_dict().values())


def test_states_that_do_not_fit_are_refused():
    drafter = NgramCache(VOCAB, capacity=4, followers=2)
    drafter.session().begin([1, 2, 3, 4, 5, 6])
    good = drafter.state_dict()
    for broken in (
        {"candidates": torch.zeros(2, 2)},
        good | {"followers": good["followers"] + VOCAB},
        good | {"counts": good["counts"] + 1},
        good | {"counts": good["counts"].float()},
        good | {"followers": good["followers"][:, :2]},
        good | {"leaders": torch.zeros_like(good["leaders"])},
    ):
        with pytest.raises(UserError, match="start: the saved n-gram table"):
            drafter.load_state_dict(broken)
    with pytest.raises(UserError, match="at most 1 leaders"):
        NgramCache(VOCAB, capacity=1).load_state_dict(good)
    drafter.load_state_dict(good)
    assert rows_of(drafter.table) == [[(1,), [(2, 3, 4)]], [(2,), [(3, 4, 5)]], [(3,), [(4, 5, 6)]]]


@pytest.mark.parametrize(
    "wrong", [dict(leader=0), dict(follower=0), dict(capacity=0), dict(followers=0), dict(nodes=2)]
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(UserError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        NgramCache(VOCAB, **wrong)
