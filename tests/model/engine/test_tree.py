"""Trees: derived facts by hand, invariants on random trees, malformed input."""

import random

import pytest

from model.engine import Tree
from model.errors import UserError


def random_tree(n: int, rng: random.Random, k: int = 4) -> Tree:
    """A random prefix-closed set of n rank paths."""
    paths: set[tuple[int, ...]] = set()
    while len(paths) < n:
        parent = rng.choice([(), *paths])
        paths.add((*parent, rng.randrange(k)))
    return Tree.from_rank_paths(paths)


def test_small_tree_by_hand():
    tree = Tree.from_rank_paths([[1], [0], [0, 2], [1, 0], [0, 2, 0]])
    assert tree.rank_paths == [(), (0,), (1,), (0, 2), (1, 0), (0, 2, 0)]
    assert tree.parents.tolist() == [0, 0, 0, 1, 2, 3]
    assert tree.levels == [(0, 1), (1, 3), (3, 5), (5, 6)]
    assert tree.paths[4].tolist() == [0, 2, 4, 4]
    assert Tree([0, 0, 0, 1, 1]).ranks.tolist() == [0, 0, 1, 0, 1]
    assert not tree.is_chain and Tree.chain(3).is_chain and Tree.chain(0).is_chain


@pytest.mark.parametrize("seed", range(8))
def test_invariants_on_random_trees(seed):
    rng = random.Random(seed)
    tree = random_tree(rng.randrange(1, 60), rng)
    for i in range(1, len(tree)):
        parent = int(tree.parents[i])
        assert tree.rank_paths[i][:-1] == tree.rank_paths[parent]
        assert tree.depths[i] == tree.depths[parent] + 1 == len(tree.rank_paths[i])
        assert tree.ancestors[i].nonzero().flatten().tolist() == tree.chain_of[i]
        assert tree.chain_of[i] == [*tree.chain_of[parent], i]
        assert tree.depths[i] >= tree.depths[i - 1]
    assert Tree(tree.parents.tolist(), tree.ranks.tolist()).rank_paths == tree.rank_paths


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([[0, 0]], r"\[0, 0\] has no parent; add \[0\]"),
        ([[0], [0]], r"\[0\] is given twice"),
        ([[]], "not a rank path"),
        ([[-1]], "not a rank path"),
        ([["a"]], "not a rank path"),
        ([[0], [True]], "not a rank path"),
    ],
)
def test_malformed_paths_are_refused_by_name(paths, says):
    with pytest.raises(UserError, match=says):
        Tree.from_rank_paths(paths)


@pytest.mark.parametrize("parents", [[], [1], [0, 1], [0, 0, 2], [0, 0, 1, 0]])
def test_parents_that_are_no_breadth_first_tree_are_refused(parents):
    with pytest.raises(UserError, match="tree:"):
        Tree(parents)
