"""The best n nodes: their acceptance and order are learnt."""

import pytest
import torch

from model.engine import Draft, Tree, Verification
from model.recycling import TokenRecycling
from model.recycling.acceptance import REORDERS, Acceptance
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


def test_a_nodes_share_is_of_the_steps_that_accepted_its_parent():
    paths = [(0,), (1,), (0, 0), (1, 0), (1, 1)]
    acceptance = Acceptance(paths)
    tree = Tree.from_rank_paths(paths)
    for node in [(1, 0), (1, 0), (1,), (0,)] * 500:
        acceptance.update(tree, tree.rank_paths.index(node))
    expected = [1 / 4, 3 / 4, 0, 1 / 2, 0]
    assert acceptance.probabilities() == pytest.approx(expected, abs=0.03)
    unseen = Acceptance(paths).probabilities()
    law = [likelihood(path) for path in paths]
    assert unseen == pytest.approx(law)


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
