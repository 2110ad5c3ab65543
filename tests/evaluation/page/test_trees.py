"""The drawing of a tree."""

from evaluation.page import render
from evaluation.page.tree_svg import draw
from evaluation.records.runs import read_runs
from evaluation.tables.experiment import Experiment
from model.recycling import build_template
from tests.evaluation.page.conftest import answer, write_run

STEPS = [(1, 1, []), (3, 4, [0, 0]), (2, 4, [1]), (1, 4, []), (2, 4, [0])]


def drawing_of(folder, steps, **settings):
    """The drawing of a run whose only answer took these steps."""
    ids = settings.pop("ids", range(sum(n for n, _, _ in steps)))
    write_run(
        folder, "recycling (hot)", [answer(7, "qa", {"ids": list(ids), "steps": steps})], **settings
    )
    (pool,) = Experiment(read_runs(folder)).pools
    return draw(pool)


def test_without_a_fixed_tree_nothing_is_drawn(tmp_path):
    assert drawing_of(tmp_path / "none", STEPS, method={"nodes": 24}) is None


def test_the_drawing_has_every_node_once_and_no_two_on_one_place(tmp_path):
    tree = [list(path) for path in build_template("2.2.2").rank_paths[1:]]
    steps = [(accepted, 81 if nodes == 4 else nodes, path) for accepted, nodes, path in STEPS]
    drawing = drawing_of(tmp_path, steps, method={"tree": "2.2.2"}, draft_tree=tree)
    places, parents = ([tuple(dot[i : i + 2]) for dot in drawing["dots"]] for i in (3, 5))
    assert len(places) == len(set(places)) == 80 and set(parents) - set(places) == {drawing["root"]}
    assert all(0 < x < drawing["size"][0] and 0 < y < drawing["size"][1] for x, y in places)
    shades = {ranks: colour for _, ranks, colour, *_ in drawing["dots"] if colour}
    assert shades == {"0": 7, "0·0": 6, "1": 6}
    assert "80 nodes, depth 6, of which 77 were never" in render(
        Experiment.read(tmp_path), tmp_path
    )
