"""Figures: each is drawn where the runs vary in its setting, and only there; one can be added by one function."""

import math
from itertools import combinations
from xml.dom import minidom

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from evaluation import figures
from evaluation.figures import draw_all, split, style
from evaluation.figures.figure_data import FigureData
from evaluation.figures.style import finish, panels
from evaluation.records.runs import IN_TABLES
from evaluation.tables.experiment import Experiment
from tests.evaluation.made_runs import answer, made

pytestmark = pytest.mark.usefixtures("drawn")

TREE = [[0], [1], [0, 0]]


def questions(fast=1):
    return [
        answer(i, "qa" if i % 2 else "rag", [([2, 1 + fast, 1], 1.0)],
               step_nodes=[[4, 4, 1]], step_paths=[[[0], [0] * fast, []]])
        for i in range(8)
    ]  # fmt: skip


def recycling(start="hot", fast=1, tree=TREE, tree_name="best", **method):
    settings = {"k": 8, "tree": tree_name, "tree_nodes": len(tree)} | method
    return made(f"recycling ({start})", questions(fast), method=settings, draft_tree=tree)


def decided(**settings):
    run = recycling()
    run.metadata["settings"] |= settings
    return run


def drawn_at(temperature):
    return decided(sampling={"temperature": temperature} if temperature else {})


def data_of(runs):
    (data,) = split(Experiment(runs)).values()
    return data


def names(runs):
    """The figures that these runs have."""
    data = data_of(runs)
    return {draw.__name__ for draw in figures.FIGURES if draw(data) is not None}


ALWAYS = {
    "mat",
    "speedup_over_vanilla",
    "acceptance_by_depth",
}
RISING = [recycling(tree=TREE[:n], tree_nodes=n) for n in (1, 2, 3)]
VARIED = {
    "tree_size": RISING,
    "topk": [recycling(k=k) for k in (2, 4, 8)],
    "temperature": [drawn_at(t) for t in (0.0, 0.5, 1.0)],
    "budget": [
        *RISING,
        *(made("dynamic (hot)", questions(2), method={"nodes": n}) for n in (1, 2, 3)),
    ],
    "batch": [decided(batch=n) for n in (1, 2, 4)],
}


def test_of_one_method_no_figure_of_a_sweep_is_drawn():
    assert names([made("vanilla", questions()), recycling()]) == ALWAYS


@pytest.mark.parametrize("figure", VARIED)
def test_a_figure_is_drawn_where_the_runs_vary_in_its_setting(figure):
    also = {"tree_size"} if figure == "budget" else set()
    assert names([made("vanilla", questions()), *VARIED[figure]]) == ALWAYS | {figure} | also


def drawn(figure, runs, panel=0):
    """The lines of a panel of a figure, each label's ys."""
    axes = getattr(figures, figure)(data_of(runs)).axes[panel]
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def test_a_budgets_gain_is_over_recycling_with_the_same_start():
    # lengths 2, 3, 1 against 2, 2, 1, the same on every question
    gains = {"recycling (hot)": [1.0] * 3, "dynamic (hot)": pytest.approx([6 / 5] * 3)}
    assert drawn("budget", VARIED["budget"], panel=1) == gains
    cold = [recycling("cold", 0, TREE[:n], tree_nodes=n) for n in (1, 2, 3)]  # lengths 2, 1, 1
    gains["recycling (cold)"] = [1.0] * 3
    assert drawn("budget", VARIED["budget"] + cold, panel=1) == gains


def test_turns_with_more_new_tokens_are_further_right():
    turns = [([8], 1), ([4, 4], 2), ([2, 4, 2], 4), ([2, 2, 2, 2], 8)]  # of eight tokens each
    rows = [answer(i, "qa", [(turns[i % 4][0], 1.0)], novel_tokens=[turns[i % 4][1]])
            for i in range(8)]  # fmt: skip
    assert drawn("novelty", [made("pld", rows)]) == {"pld": [8.0, 4.0, 8 / 3, 2.0]}
    assert "novelty" not in names([made("pld", questions())]), "new tokens were not counted"
    served = [answer(i, "qa", [([8], 1.0)], novel_tokens=[i], accept_lengths=[]) for i in range(8)]
    assert "novelty" not in names([made("other", served)]), "steps are not known"


STEPS = {"step_nodes": [[4] * 4], "step_paths": [[[], [0], [0, 0], []]]}
DEEP = [made("pld", [answer(1, "qa", [([1, 2, 3, 1], 1.0)], **STEPS)])]


@pytest.mark.parametrize(
    ("figure", "runs", "panel", "values"),
    [
        ("acceptance_by_depth", DEEP, 0, [50, 25]),
        ("acceptance_by_depth", DEEP, 1, [50, 50]),
    ],
)
def test_lines_by_hand(figure, runs, panel, values):
    assert drawn(figure, runs, panel) == {"pld": values}


def test_what_is_left_out_is_said():
    many = [made(f"m{i} (hot)", questions(i % 3), method={"nodes": 4}) for i in range(11)]
    data = data_of([*many, made("vanilla", questions())])
    shown = [line.get_label() for line in figures.acceptance_by_depth(data).axes[0].lines]
    assert shown == [f"m{i} (hot)" for i in (0, 1, 2, 4, 5, 7, 8, 10)], "those of the largest MAT"
    note = figures.acceptance_by_depth(data).get_supxlabel()
    assert note.endswith("; 8 of 12 configurations are drawn; left out: m3, m6, m9")


def test_trees_of_one_size_and_several_depths_are_no_line():
    trees = [[[0]], [[0], [1]], [[0], [1], [2]], [[0], [0, 0], [0, 0, 0]]]
    runs = [recycling(tree=tree, tree_sha256=str(tree)) for tree in trees]
    assert figures.tree_size(data_of(runs[:3])) is not None
    assert figures.tree_size(data_of(runs)) is None


def test_a_run_has_the_same_look_in_every_figure():
    """Methods have their colours; two starts of a method differ in the fill alone."""
    runs = [made("vanilla", questions()), made("goose (hot)", questions())]
    data = data_of([*runs, recycling(), recycling("cold", 0)])
    looks = {}
    for draw in (figures.mat, figures.acceptance_by_depth):
        for axes in draw(data).axes:
            for line in axes.lines:
                look = (line.get_color(), line.get_marker(), line.get_markerfacecolor())
                looks.setdefault(line.get_label(), set()).add(look)

    (hot,) = looks["recycling (hot)"]
    (cold,) = looks["recycling (cold)"]
    (goose,) = looks["goose (hot)"]
    assert hot[:2] == cold[:2] and hot != cold
    assert (hot[0], goose[0]) == ("#E69F00", "#E49659")


def cielab(color):
    """A colour by CIE 1976, white D65."""
    linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in to_rgb(color)]
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear / [0.9505, 1.0, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_no_two_methods_share_a_colour():
    """A difference of 2 is just seen; the first eight colours are far apart."""
    assert set(style.COLORS) == {*IN_TABLES, "server"}
    colors = [cielab(color) for color in style.COLORS.values()]
    for among, least in ((colors, 12), (colors[:8], 26)):
        assert min(math.dist(one, other) for one, other in combinations(among, 2)) > least


def test_the_same_records_give_the_same_files_and_nothing_else_stays(
    every_kind, tmp_path, monkeypatch
):
    """A newcomer's figure is one function, listed."""

    def mat_by_k(data: FigureData):
        """MAT by k."""
        figure, (axes,) = panels("k", "MAT", height=1.9)
        axes.plot([row["k"] for row in data.drafting], [row["mat"] for row in data.drafting])
        return finish(figure, data.measured)

    monkeypatch.setattr(figures, "FIGURES", (mat_by_k,))
    files = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (folder / "old.svg").write_text("of another set of runs")
        draw_all(Experiment([made("vanilla", questions()), recycling()]), folder)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1]
    assert set(files[0]) == {f"mat_by_k.{kind}" for kind in ("pdf", "png", "svg")}


# Mathematics, LaTeX, a legend's hidden label, two lines, no glyph, no XML, no UTF-8.
ODD = "_a_$A_$B $C \\frac{% ^&#~\nnext 日🙂\x00\x1b[31m\x9b\u202e\ufffe\ud800"
DRAWN = "_a_$A_$B $C \\frac{% ^&#~ next \\u65e5\\ud83d\\ude42\\u0000\\u001b[31m\\u009b\\u202e\\ufffe\\ud800"


def test_any_name_can_be_drawn(tmp_path, recwarn, monkeypatch):
    """A note with two $ ended in a traceback; a control character made a file that is no SVG."""
    monkeypatch.setattr(figures, "FIGURES", (figures.mat,))
    run = made("pld", questions(), model={"name": ODD})
    run.metadata["device"] = ODD
    run.metadata["label"] = ODD
    run.metadata["settings"]["bench"]["name"] = ODD
    for row in run.answers:
        row["category"] = f"{ODD} {row['category']}"
    figures.draw_all(Experiment([run]), tmp_path)
    (path,) = tmp_path.iterdir()
    assert DRAWN.split()[0] in minidom.parse(str(path)).toxml(), "a comment of its glyphs"
    assert not [str(warning.message) for warning in recwarn if "lyph" in str(warning.message)]
