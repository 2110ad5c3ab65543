"""How a static step ends, against the walk over lists."""

import random

import pytest
import torch

from model.decoding import Draft
from model.decoding.settlement import Settlement
from model.decoding.verification import verify
from tests.model.decoding.test_tree import random_tree

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.mark.parametrize("seed", range(8))
def test_a_settlement_is_the_walk_over_lists(seed):
    rng = random.Random(seed)
    tree = random_tree(rng.randint(0, 30), rng)
    length = torch.tensor(40, device=DEVICE)
    own, before = Settlement(tree.on(DEVICE), length), 40
    for _ in range(5):
        tokens, candidates = torch.randint(0, 3, (len(tree),)), torch.randint(0, 3, (len(tree), 4))
        choices = candidates[:, 0]
        own(tokens.to(DEVICE), candidates.to(DEVICE)[:, 0])
        expected = verify(Draft(tree, tokens), choices)
        node, *chosen = own.read()
        depth = tree.depth_of[node]
        assert (node, chosen[: depth + 1]) == (expected.node, expected.tokens)
        assert own.stands.tolist() == expected.stands.tolist()
        assert (own.source - before).tolist()[: depth + 1] == expected.path
        assert (own.to - before).tolist() == list(range(tree.max_depth + 1))
        assert int(own.root) == expected.tokens[-1] and int(length) == before + len(expected.tokens)
        before = int(length)
