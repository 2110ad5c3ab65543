"""Verification: the rule's slow twin on random drafts."""

import random

import pytest
import torch

from model.engine import Draft, verify
from model.engine.rule.verification import Commit
from tests.model.engine.test_tree import random_tree

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.mark.parametrize("seed", range(12))
def test_against_a_walk_down_the_tree(seed):
    rng = random.Random(seed)
    tree = random_tree(rng.randrange(1, 40), rng)
    n = len(tree)
    tokens = [rng.randrange(3) for _ in range(n)]
    choices = [rng.randrange(3) for _ in range(n)]
    best: list[int] = [0]
    for i in range(n):
        chain = tree.chain_of[i]
        if all(tokens[b] == choices[a] for a, b in zip(chain, chain[1:], strict=False)) and len(
            chain
        ) > len(best):
            best = chain
    verification = verify(Draft(tree, torch.tensor(tokens)), torch.tensor(choices))
    assert verification.path == best
    assert verification.tokens == [choices[i] for i in best]


@pytest.mark.parametrize("seed", range(8))
def test_a_commit_on_the_device_is_the_walk_over_lists(seed):
    rng = random.Random(seed)
    tree = random_tree(rng.randint(0, 30), rng)
    length = torch.tensor(40, device=DEVICE)
    commit = Commit(tree.on(DEVICE), length)
    before = 40
    for _ in range(5):
        tokens = torch.randint(0, 3, (len(tree),))
        candidates = torch.randint(0, 3, (len(tree), 4))
        choices = candidates[:, 0]
        commit(tokens.to(DEVICE), candidates.to(DEVICE)[:, 0])
        expected = verify(Draft(tree, tokens), choices)
        node, *choices_there = commit.read()
        depth = tree.depth_of[node]
        assert (node, choices_there[: depth + 1]) == (expected.node, expected.tokens)
        assert commit.accepted.tolist() == expected.accepted.tolist()
        assert (commit.source - before).tolist()[: depth + 1] == expected.path
        assert (commit.to - before).tolist() == list(range(tree.max_depth + 1))
        assert int(commit.root) == expected.tokens[-1] and int(length) == before + len(
            expected.tokens
        )
        before = int(length)
