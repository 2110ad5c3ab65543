"""The best n nodes: their acceptance and order are learnt."""

import pytest
import torch

from model.engine import Draft, Tree, Verification
from model.recycling import TokenRecycling
from model.recycling.acceptance import MEMORY_VISITS, PATH_PRIOR, RANK_PRIOR, REORDERS, Acceptance
from model.recycling.templates import likelihood

V = 61


def step(drafter, accepted):
    """One made-up step in which the path `accepted` is accepted."""
    session = drafter.session()
    tree = session.draft(5).tree
    node = max(i for i, path in enumerate(tree.rank_paths) if path == accepted[: len(path)])
    tokens = torch.zeros(len(tree), dtype=torch.long)
    accepted_nodes = tree.ancestors[node]
    candidates = torch.zeros(len(tree), 8, dtype=torch.long)
    session.observe(
        Verification(Draft(tree, tokens), tokens, accepted_nodes, node, [1], candidates=candidates)
    )
    return len(tree) - 1


def test_a_step_is_counted_by_hand():
    acceptance = Acceptance([(0,), (1,), (0, 0), (0, 1)])
    tree = Tree.from_rank_paths([(0,), (1,), (0, 0), (0, 1)])
    law = [likelihood((0,)), likelihood((1,))]
    assert acceptance.probabilities() == pytest.approx(
        [law[0], law[1], law[0] ** 2, law[0] * law[1]]
    )
    acceptance.update(tree, tree.rank_paths.index((0, 1)))
    # visited once each, as their parents were accepted: (0,) accepted, (1,) not, (0, 0) not, (0, 1) accepted
    keep = 1 - 1 / MEMORY_VISITS
    by_rank = []
    for rank, hits in ((0, (1, 0)), (1, (0, 1))):
        visits, accepted = RANK_PRIOR, RANK_PRIOR * law[rank]
        for hit in hits:
            visits, accepted = visits * keep + 1, accepted * keep + hit
        by_rank.append(accepted / visits)
    c = [
        (hit + PATH_PRIOR * by_rank[rank]) / (1 + PATH_PRIOR)
        for hit, rank in ((1, 0), (0, 1), (0, 0), (1, 1))
    ]
    assert acceptance.probabilities() == pytest.approx([c[0], c[1], c[0] * c[2], c[0] * c[3]])


def test_steps_without_a_draft_lead_back_to_the_law():
    """They teach the matrix, and what an empty one let fall says nothing about a full one."""
    acceptance = Acceptance([(0,), (0, 0)])
    before = acceptance.probabilities()
    tree = Tree.from_rank_paths([(0,), (0, 0)])
    for _ in range(50):
        acceptance.update(tree, 0)
    assert acceptance.probabilities()[0] < 0.3 * before[0]
    for _ in range(3000):
        acceptance.update(Tree.chain(0), 0)
    assert acceptance.probabilities() == pytest.approx(before, rel=1e-3)


def test_the_order_is_learnt():
    """Second candidates alone stand here, which the published order has late."""
    drafter = TokenRecycling(V, nodes="auto")
    for _ in range(600):
        step(drafter, (1, 1))
    assert drafter.session().draft(5).tree.rank_paths[1:3] == [(1,), (1, 1)]
    assert sorted(REORDERS)[:4] == [32, 128, 512, 2048]
