"""Cacheback: drafts against plain lists of n-grams."""

import random

import pytest

from model.methods.rivals.ngram_cache import NgramCache, best_slots

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
