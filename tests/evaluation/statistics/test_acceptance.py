"""Acceptance by depth and by rank path, and the tree search on it, by hand and by brute force."""

import itertools
import random

import pytest
import yaml

from evaluation import tree_search
from evaluation.statistics.acceptance import Node, by_depth, by_rank_path
from evaluation.tree_search import half_of, search
from model.errors import UserError
from model.recycling import build_template
from tests.evaluation.made_runs import answer, made, write


def steps(*paths, nodes=4):
    """A question whose steps accepted these paths, then one that drafted nothing."""
    lengths = [len(path) + 1 for path in paths] + [1]
    records = {"step_nodes": [[nodes] * len(paths) + [1]], "step_paths": [[*map(list, paths), []]]}
    return answer(1, "qa", [(lengths, 1.0)], **records)


def test_by_depth_by_hand():
    # five drafting steps: two stop at the root, one reaches depth 1, two depth 3; the last step drafted nothing
    found = by_depth([steps((), (), (0,), (0, 0, 0), (1, 0, 0))])
    assert [(d.depth, d.steps) for d in found] == [(1, 3), (2, 2), (3, 2)]
    assert [d.joint for d in found] == [3 / 5, 2 / 5, 2 / 5]
    assert [d.conditional for d in found] == [3 / 5, 2 / 3, 1.0]
    assert by_depth([steps((0,), nodes=1)]) == [], "a root alone drafts nothing"
    assert by_depth([answer(1, "qa", [([2], 1.0)])]) == []


def test_by_rank_path_by_hand():
    tree = [[0], [1], [0, 0], [0, 1], [1, 0]]
    found = by_rank_path([steps((), (0,), (0, 1), (1, 0), (0, 1))], tree)
    assert found[(0,)] == Node(5, 3) and found[(1,)] == Node(5, 1)
    assert found[(0, 0)] == Node(3, 0) and found[(0, 1)] == Node(3, 2) and found[(1, 0)].share == 1.0


def test_the_search_is_as_good_as_trying_every_tree():
    rng = random.Random(1)
    tree = [tuple(p) for p in build_template("balanced", branching=2, depth=3).rank_paths[1:]]
    rows = [steps(*[rng.choice([(), *tree]) for _ in range(300)], nodes=15)]
    acceptance = by_rank_path(rows, tree)
    for n in (1, 3, 5):
        best = max(
            sum(acceptance[p].stood for p in chosen)
            for chosen in itertools.combinations(tree, n)
            if all(p[:-1] in (*chosen, ()) for p in chosen)
        )
        assert sum(acceptance[p].stood for p in search(acceptance, n)) == best
    with pytest.raises(UserError, match="14 nodes"):
        search(acceptance, 15)


def test_halves_share_nothing_and_miss_nothing():
    rows = [answer(i, "qa" if i % 3 else "rag", [([1], 1.0)]) for i in range(9)]
    even, odd = (half_of(rows, half) for half in ("even", "odd"))
    assert sorted(r["question_id"] for r in even + odd) == list(range(9))
    assert {r["category"] for r in even} == {r["category"] for r in odd} == {"qa", "rag"}


def test_the_command_writes_a_template_that_the_harness_reads(call, tmp_path):
    tree = [[0], [1], [0, 0], [0, 1]]
    run = made("recycling (hot)", [steps((1,), (1,), (0, 1), (1,), (0, 1))], draft_tree=tree,
               method={"tree": "x", "tree_nodes": 4})  # fmt: skip
    write(run, tmp_path)
    out = tmp_path / "found.yaml"
    outcome = call(tree_search.main, tmp_path, "--nodes", 3, "--output", out)
    assert outcome.code == 0, outcome.err
    assert yaml.safe_load(out.read_text())["nodes"] == [[0], [1], [0, 1]]
    assert yaml.safe_load(out.read_text())["expected_accepted"] == 7 / 5
    assert build_template("file", path=str(out)).rank_paths[1:] == [(0,), (1,), (0, 1)]
    assert "4 nodes" in call(tree_search.main, tmp_path, "--nodes", 9, "--output", out).err
    assert "no run with a fixed" in call(tree_search.main, tmp_path, "--nodes", 1, "--output", out, "--method", "x").err
