"""Templates: the published tree node by node, the families, refusals."""

import pytest

from model.engine import Target
from model.engine.rule.tree import read_tree
from model.errors import UserError
from model.methods import make_method
from model.recycling import build_template

# per depth the published nodes, written in another way than the YAML: prefix:children
PUBLISHED_LEVELS = [
    ":8",
    "0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1",
    "00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 50:1",
    "000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1",
    "0000:3 0001:1 0002:1 0010:1 0100:1 1000:1",
    "00000:2 00010:1",
]


def test_the_published_tree_node_by_node():
    tree = build_template("2.2.2")
    expected = [
        (*map(int, prefix), rank)
        for level in PUBLISHED_LEVELS
        for prefix, children in (one.split(":") for one in level.split())
        for rank in range(int(children))
    ]
    assert tree.rank_paths[1:] == expected
    assert len(tree) == 81


def test_best_has_n_nodes_and_each_holds_the_smaller():
    for n in (0, 1, 7, 16, 24, 79, 80, 81, 160):
        tree = build_template("best", nodes=n)
        smaller = build_template("best", nodes=max(n - 1, 0))
        assert len(tree) == n + 1
        assert set(smaller.rank_paths) <= set(tree.rank_paths)


def test_a_tree_by_its_name_has_the_ranks_that_k_stores(llama):
    """`best:N` had the ranks of k = 8 for every k: refused below, cut short above."""
    for k in (2, 16):
        drafter = make_method("recycling", Target(llama), tree="best:60", k=k)
        assert drafter.tree.rank_paths == build_template("best", nodes=60, k=k).rank_paths


def test_families_by_hand():
    assert build_template("chain", depth=3, k=1).rank_paths == [(), (0,), (0, 0), (0, 0, 0)]
    balanced = build_template("balanced", branching=2, depth=2, nodes=9, k=2)
    assert balanced.rank_paths == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(build_template("balanced", branching=3, depth=3, nodes=20)) == 21


WRONG = [
    (dict(name="3.3.3"), "no template '3.3.3'; there are 2.2.2, best, chain"),
    (dict(name="2.2.2", k=4), "'2.2.2' needs candidates up to rank 7, but k=4"),
    (dict(name="2.2.2", nodes=4), "'2.2.2' has no parameter nodes"),
    (dict(name="best"), "'best' needs nodes"),
    (dict(name="chain", depth=-1), "depth=-1"),
    (dict(name="balanced", branching=8, depth=9), "'balanced' needs nodes"),
    (dict(name="file", path="nowhere.yaml"), "nowhere.yaml cannot be read"),
]


def test_wrong_settings_are_refused_by_name(tmp_path):
    for settings, says in WRONG:
        with pytest.raises(UserError, match=says):
            build_template(**settings)
    path = tmp_path / "wrong.yaml"
    for text in ("nodes: 3", "[0, 1]", "- [0, 0]", "- ['a']", "{", "- [0]\n- [0]", "", "- [1.5]"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"wrong.yaml"):
            read_tree(path)


@pytest.mark.parametrize("depth, branching", [(1, 8), (8, 1), (3, 4), (6, 8)])
def test_a_shape_is_as_deep_and_wide_as_it_says(depth, branching):
    tree = build_template("shape", nodes=80, depth=depth, branching=branching)
    assert len(tree) - 1 == min(80, sum(branching**d for d in range(1, depth + 1)))
    assert (tree.max_depth, tree.max_rank + 1) == (depth, branching)
