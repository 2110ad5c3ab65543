"""Acceptance by depth and by rank path, and the tree search on it, by hand and by brute force."""

from collections import Counter

import yaml

from evaluation import tree_search
from evaluation.statistics.acceptance import (
    TREE_SOURCE,
    Node,
    accepted_paths,
    by_depth,
    by_node,
)
from model.recycling import build_template
from tests.evaluation.made_runs import answer, made, write


def stepped(*paths, nodes=4):
    """A question whose steps accepted these paths, then one that drafted nothing."""
    lengths = [len(path) + 1 for path in paths] + [1]
    records = {"step_nodes": [[nodes] * len(paths) + [1]], "step_paths": [[*map(list, paths), []]]}
    return answer(1, "qa", [(lengths, 1.0)], **records)


def test_by_depth_by_hand():
    # five drafting steps: two stop at the root, one reaches depth 1, two depth 3; the last step drafted nothing
    depths = by_depth(accepted_paths([stepped((), (), (0,), (0, 0, 0), (1, 0, 0))]))
    # depth, steps, joint, conditional
    assert depths == [
        (1, 3, 3 / 5, 3 / 5),
        (2, 2, 2 / 5, 2 / 3),
        (3, 2, 2 / 5, 1.0),
    ]
    assert by_depth(accepted_paths([stepped((0,), nodes=1)])) == [], "a root alone drafts nothing"
    assert by_depth(accepted_paths([answer(1, "qa", [([2], 1.0)])])) == []


def test_by_node_by_hand():
    tree = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    nodes = by_node(accepted_paths([stepped((), (0,), (0, 1), (1, 0), (0, 1), nodes=6)]), tree)
    counts = [(5, 3, 5), (5, 1, 5), (5, 0, 3), (5, 2, 3), (5, 1, 1)]
    assert nodes == [Node(path, *count) for path, count in zip(tree, counts, strict=True)]
    assert (
        nodes[3].share == 2 / 5 and nodes[3].given_parent == 2 / 3 and nodes[4].given_parent == 1.0
    )


def test_a_smaller_tree_tries_its_first_nodes_only():
    records = {"step_nodes": [[3, 2]], "step_paths": [[[0], [0]]]}
    accepted = accepted_paths([answer(1, "qa", [([2, 2], 1.0)], **records)])
    nodes = by_node(accepted, [(0,), (1,), (0, 0)])
    assert [(node.tried, node.accepted) for node in nodes] == [(2, 2), (1, 0), (0, 0)]
    assert nodes[2].share == nodes[2].given_parent == 0.0


def test_steps_know_what_drafted_them():
    """Of several sources the fixed tree's steps count for its nodes, whatever their size; all count for depths."""
    records = {"step_nodes": [[1, 4, 4], [4]], "step_paths": [[[], [0, 0], [0, 0, 0]], [[1]]]}
    sources = [["", TREE_SOURCE, "suffix"], [TREE_SOURCE]]
    row = answer(7, "qa", [([1, 3, 4], 1.0), ([2], 1.0)], step_sources=sources, **records)
    every = accepted_paths([row])
    assert accepted_paths([row], TREE_SOURCE) == {(4, (0, 0)): 1, (4, (1,)): 1}
    assert every.total() == 3 and len(by_depth(every)) == 3 and by_depth(Counter()) == []


def test_the_search_writes_the_nodes_most_often_accepted_as_a_template(call, tmp_path):
    tree = [[0], [1], [0, 0], [0, 1]]
    run = made("recycling (hot)", [stepped((1,), (1,), (0, 1), (1,), (0, 1), nodes=5)], draft_tree=tree,
               method={"tree": "x", "tree_nodes": 4})  # fmt: skip
    write(run, tmp_path)
    out = tmp_path / "found.yaml"
    outcome = call(tree_search.main, tmp_path, "--nodes", 3, "--output", out)
    assert outcome.code == 0, outcome.err
    assert yaml.safe_load(out.read_text())["nodes"] == [[0], [1], [0, 1]]
    assert yaml.safe_load(out.read_text())["expected_accepted"] == 7 / 5
    assert build_template("file", path=str(out)).rank_paths[1:] == [(0,), (1,), (0, 1)]
    assert "4 nodes" in call(tree_search.main, tmp_path, "--nodes", 9, "--output", out).err
    assert (
        "no run with a fixed"
        in call(tree_search.main, tmp_path, "--nodes", 1, "--output", out, "--method", "x").err
    )
