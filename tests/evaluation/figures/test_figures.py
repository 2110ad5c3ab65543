"""Figures: each is drawn where the runs vary in its setting, and only there; one can be added by one function."""

import copy
import os
import subprocess
import sys
from xml.dom import minidom

import pytest

from evaluation import figures
from evaluation.figures import draw_all, split
from evaluation.figures.figure_data import FigureData
from evaluation.figures.style import finish, panels
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.pools import mat_ratio
from model.files import ROOT
from tests.evaluation.made_runs import answer, made

pytestmark = pytest.mark.usefixtures("drawn")

TREE = [[0], [1], [0, 0]]


def questions(fast=1):
    return [
        answer(i, "qa" if i % 2 else "rag", [([2, 1 + fast, 1], 1.0)], repeated_3grams=[i / 10],
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


def names(runs):
    """The figures that these runs have."""
    (data,) = split(Experiment(runs)).values()
    return {draw.__name__ for draw in figures.FIGURES if draw(data) is not None}


@pytest.mark.slow
def test_a_notebooks_backend_stops_no_command(tmp_path):
    """Its kernel exports one to its shells, whose environment may lack it: matplotlib's import raised ValueError."""
    backend = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    command = [sys.executable, "-m", "evaluation.report", str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | backend, capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert (
        done.returncode == 2 and done.stderr.startswith("error: ") and "no runs here" in done.stderr
    )


@pytest.mark.slow
def test_a_backend_that_there_is_stays_the_callers():
    kept = "import os, evaluation.figures, matplotlib as m; print(os.environ['MPLBACKEND'], m.rcParams['backend'])"
    done = subprocess.run(
        [sys.executable, "-c", kept],
        env=os.environ | {"MPLBACKEND": "pdf"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout == "pdf pdf\n"


ALWAYS = {
    "mat",
    "speedup_over_vanilla",
    "accepted_lengths",
    "acceptance_by_depth",
    "mat_over_questions",
}
VARIED = {
    "tree_size": [recycling(tree=TREE[:n], tree_nodes=n) for n in (1, 2, 3)],
    "topk": [recycling(k=k) for k in (2, 4, 8)],
    "temperature": [drawn_at(t) for t in (0.0, 0.5, 1.0)],
    "budget": [recycling(tree=TREE[:n], tree_nodes=n) for n in (1, 2, 3)]
    + [made("spine (hot)", questions(2), method={"nodes": n}) for n in (1, 2, 3)],
    "batch": [decided(batch=n) for n in (1, 2, 4)],
    "tree_shape": [
        recycling(tree=tree, tree_name="shape", tree_nodes=len(tree))
        for tree in ([[0]], [[0], [1]], [[0], [0, 0]], [[0], [1], [0, 0]])
    ],
}


def test_a_figure_is_drawn_where_the_runs_vary_in_its_setting():
    assert names([made("vanilla", questions()), recycling()]) == ALWAYS, (
        "of one method none of a sweep"
    )
    for figure, runs in VARIED.items():
        also = {"tree_size"} if figure == "budget" else set()
        assert names([made("vanilla", questions()), *runs]) - also == ALWAYS | {figure}


def drawn(figure, runs, panel=0):
    """The lines of a panel of a figure, each label's ys."""
    (data,) = split(Experiment(runs)).values()
    axes = getattr(figures, figure)(data).axes[panel]
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def test_lines_are_at_their_values():
    """By hand."""
    # lengths 2, 3, 1 against 2, 2, 1, the same on every question
    gains = drawn("budget", VARIED["budget"], panel=1)
    assert gains == {"recycling (hot)": [1.0] * 3, "spine (hot)": pytest.approx([6 / 5] * 3)}
    cold = [recycling("cold", 0, TREE[:n], tree_nodes=n) for n in (1, 2, 3)]  # lengths 2, 1, 1
    gains = drawn("budget", VARIED["budget"] + cold, panel=1)
    assert gains["spine (hot)"] == pytest.approx([6 / 5] * 3), "hot over hot"
    assert gains["recycling (cold)"] == [1.0] * 3
    (data,) = split(Experiment(VARIED["budget"])).values()
    mats = {row["pool"].method: row for row in data.drafting}
    assert mat_ratio(mats["spine"]["pool"].cells, mats["recycling"]["pool"].cells) == pytest.approx(
        [6 / 5] * 3
    )
    steps = {"step_nodes": [[4] * 4], "step_paths": [[[], [0], [0, 0], []]]}
    deep = [made("pld", [answer(1, "qa", [([1, 2, 3, 1], 1.0)], **steps)])]
    assert drawn("acceptance_by_depth", deep) == {"pld": [50, 25]}
    assert drawn("acceptance_by_depth", deep, panel=1) == {"pld": [50, 50]}
    rising = [made("pld (hot)", [answer(i, "qa", [([1 + i], 1.0)]) for i in range(16)])]
    assert drawn("mat_over_questions", rising) == {
        "pld (hot)": [1.0, *(i + 1.5 for i in range(15))]
    }
    shapes = [*VARIED["tree_shape"], recycling("cold", 0, TREE, "shape")]
    (data,) = split(Experiment(shapes)).values()
    texts = [text.get_text() for text in figures.tree_shape(data).axes[0].texts]
    assert texts == ["1.67\n(2)", "1.67", "1.67\n(1)"], "of two starts the larger MAT"


def test_a_method_looks_alike_in_all_figures_and_what_is_left_out_is_said():
    """Colours had been those of the order in each figure; of 17 methods 17 lines were drawn in 8 colours."""
    swept = VARIED["budget"] + [made(f"goose ({start})", questions(3), method={"nodes": n})
                                for n in (1, 2, 3) for start in ("cold", "hot")]  # fmt: skip
    inks = {"recycling": "#E69F00", "spine": "#0072B2", "goose": "#009E73"}
    for runs in (swept, VARIED["tree_size"]):
        (data,) = split(Experiment(runs)).values()
        for draw in (
            figures.budget,
            figures.tree_size,
            figures.accepted_lengths,
            figures.mat_over_questions,
        ):
            lines = [line for axes in getattr(draw(data), "axes", ()) for line in axes.lines]
            named = [line for line in lines if line.get_label().partition(" ")[0] in inks]
            assert all(
                line.get_color() == inks[line.get_label().partition(" ")[0]] for line in named
            )
            assert {line.get_linestyle() for line in named if "goose" in line.get_label()} <= {
                "--"
            }, "a second cycle"
    (data,) = split(Experiment(swept)).values()
    assert (
        figures.accepted_lengths(data).get_supxlabel().endswith("4 of 12 configurations are drawn")
    )
    many = [made(f"m{i} (hot)", questions(i % 3), method={"nodes": 4}) for i in range(11)]
    many.append(made("vanilla", questions()))
    (data,) = split(Experiment(many)).values()
    shown = [line.get_label() for line in figures.accepted_lengths(data).axes[0].lines]
    assert shown == [f"m{i} (hot)" for i in (0, 1, 2, 4, 5, 7, 8, 10)], "those of the largest MAT"
    for figure in (figures.accepted_lengths(data), figures.novelty([data])):
        assert figure.get_supxlabel().endswith("8 of 12 configurations are drawn")
    several = [
        *VARIED["tree_shape"],
        recycling("cold", tree_name="shape"),
        made("vanilla", questions()),
    ]
    (shapes,) = split(Experiment(several)).values()
    assert figures.tree_shape(shapes).get_supxlabel().endswith("3 of 5 configurations are drawn")
    assert len(figures.mat(data).axes) == 2, "a map of numbers has a bar"
    assert [*figures.speedup_over_vanilla(data).axes[1].get_yticks()] == pytest.approx(
        [0.8, 1.0, 1.2]
    )


def test_a_budgets_line_has_trees_of_one_kind_and_intervals_are_named_where_drawn():
    def runs(first):
        rows = [first, *questions()[1:]]
        trees = [recycling(tree=TREE[:n], tree_nodes=n) for n in (1, 2, 3)]
        trees += [recycling(tree=[*TREE, [2]], tree_name="2.2.2", tree_nodes=4)]
        return [*trees, *(made("spine (hot)", rows, method={"nodes": n}) for n in (1, 2, 3))]

    assert len(drawn("budget", runs(questions()[0]))["recycling (hot)"]) == 3, (
        "none of another kind's tree"
    )
    for first, words in (
        (questions()[0], "ratios to recycling"),
        (questions(9)[0], "shaded: 95 % interval; ratio"),
    ):
        (data,) = split(Experiment(runs(first))).values()
        assert figures.budget(data).get_supxlabel().startswith(words), (
            "an interval without a width is none"
        )
    joint = figures.acceptance_by_depth(data).axes[0]
    assert joint.get_ylabel() == "joint (% of\ndrafting steps)"


def test_the_parts_of_a_step_are_means_over_steps_behind_the_prompt():
    row = answer(
        1,
        "qa",
        [([2, 2], 1.0)],
        phase_time=[{"draft": 0.2, "forward": 0.4, "prefill": 1.0}],
        forwards=[3],
    )
    (data,) = split(Experiment([made("pld", [row])])).values()
    bars = figures.overhead([data]).axes[0].patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0.0, 100.0), (100.0, 200.0)]


def test_the_optimum_is_marked_and_trees_of_one_size_and_several_depths_are_no_line():
    trees = [[[0]], [[0], [1]], [[0], [1], [2]], [[0], [0, 0], [0, 0, 0]]]
    runs = [recycling(tree=tree, tree_nodes=len(tree), tree_sha256=str(tree)) for tree in trees]
    for row in runs[1].answers:
        row["choices"][0]["wall_time"] = [0.5]
    runs.insert(0, made("vanilla", questions()))
    (data,) = split(Experiment(runs[:4])).values()
    star = next(
        line
        for axes in figures.tree_size(data).axes
        for line in axes.lines
        if line.get_marker() == "*"
    )
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (2, 2.0)
    (data,) = split(Experiment(runs)).values()
    assert figures.tree_size(data) is None


def test_a_run_has_the_same_colour_and_mark_in_every_figure():
    runs = [
        made("vanilla", questions()),
        made("suffix", questions()),
        recycling(),
        recycling("cold", 0),
    ]
    (data,) = split(Experiment(runs)).values()
    looks: dict[str, set] = {}
    for draw in (
        figures.mat,
        figures.speedup_over_vanilla,
        figures.accepted_lengths,
        figures.acceptance_by_depth,
    ):
        for line in (
            line
            for axes in draw(data).axes
            for line in axes.lines
            if not line.get_label().startswith("_")
        ):
            looks.setdefault(line.get_label(), set()).add(
                (line.get_color(), line.get_marker(), line.get_markerfacecolor())
            )
    assert set(looks) == {"vanilla", "suffix", "recycling (hot)", "recycling (cold)"}
    assert all(len(look) == 1 for look in looks.values()) and len(set.union(*looks.values())) == 4
    assert len({look[:2] for look in set.union(*looks.values())}) == 3, (
        "two starts of a method differ in the fill alone"
    )
    over_questions = figures.mat_over_questions(data).axes[0]
    assert all(
        line.get_color() in {ink for ink, *_ in looks[line.get_label()]}
        for line in over_questions.lines
    )
    # few questions: each is a point of its own
    assert over_questions.get_xlabel() == "question, in the order asked"


def test_of_many_runs_those_of_one_temperature_are_compared():
    runs = [drawn_at(t / 10) for t in range(9)]
    for run in runs[1:]:
        run.answers[:] = questions(2)  # larger MAT than greedy
    (data,) = split(Experiment(runs)).values()
    assert [row["temperature"] for row in data.shown()] == [0.0]


def test_of_many_runs_those_of_the_smallest_batch_are_compared():
    """Of each batch the baselines are its own; a figure had compared batch 16 with batch 1."""
    runs = [decided(batch=n) for n in (4, 2, 1)]
    for i, run in enumerate(runs):
        run.answers[:] = questions(fast=i)[: 8 - i]
    others = [made(f"m{i}", questions()) for i in range(8)]
    (data,) = split(Experiment([*runs, *others])).values()
    assert [row["batch"] for row in data.shown() if row["method"] == "recycling (hot)"] == [1]


def test_a_figure_across_types_names_them_all():
    runs = [recycling(), made("suffix", questions(), model={"dtype": "float16"})]
    drawn = figures.novelty(list(split(Experiment(runs)).values()))
    shares = [list(line.get_xdata()) for line in drawn.axes[0].lines[:2]]
    assert shares == [pytest.approx([0, 10, 20, 30, 40, 50, 60, 70])] * 2
    assert drawn.get_supxlabel() == "toy (float32) on a machine; toy (float16) on a machine"


def test_very_long_steps_share_the_last_point_of_a_line():
    row = answer(1, "free_verse", [([1, 1, 40, 20], 1.0)], output_ids=[[0] * 62])
    runs = [
        made("vanilla", [row]),
        made("suffix", [row]),
        made("pld", [answer(1, "qa", [([1, 16], 1.0)])]),
    ]
    (data,) = split(Experiment(runs)).values()
    (axes,) = figures.accepted_lengths(data).axes
    assert axes.get_xticklabels()[-1].get_text() == "16+"
    assert {line.get_label(): line.get_ydata()[-1] for line in axes.lines} == {
        "suffix": 50.0,
        "pld": 50.0,
    }
    assert "free verse" in [
        label.get_text() for label in figures.mat(data).axes[0].get_yticklabels()
    ]


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
    monkeypatch.setattr(figures, "ACROSS", ())
    runs = [made("vanilla", questions()), recycling()]
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (folder / "old.svg").write_text("of another set of runs")
        assert draw_all(Experiment(runs), folder) == [folder / "mat_by_k.png"]
        assert {path.name for path in folder.iterdir()} == {
            f"mat_by_k.{kind}" for kind in ("pdf", "png", "svg")
        }
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


# Mathematics, LaTeX, a legend's hidden label, two lines, no glyph, no XML, no UTF-8.
ODD = "_a_$A_$B $C \\frac{% ^&#~\nnext 日🙂\x00\x1b[31m\x9b\u202e\ufffe\ud800"
DRAWN = "_a_$A_$B $C \\frac{% ^&#~ next \\u65e5\\ud83d\\ude42\\u0000\\u001b[31m\\u009b\\u202e\\ufffe\\ud800"


@pytest.mark.slow
def test_any_name_can_be_drawn_in_every_figure(tmp_path, recwarn, monkeypatch):
    """A note with two $ ended in a traceback; a control character made a file that is no SVG."""
    sets = {
        "mat": [made("vanilla", questions()), made("hf", questions()), recycling(fast=2)],
        **VARIED,
        "overhead": [made(f"m{i} (hot)", questions()) for i in range(9)],  # as a grid of numbers
    }
    seen, every, across = set(), figures.FIGURES, figures.ACROSS
    for what, runs in sets.items():
        monkeypatch.setattr(
            figures, "FIGURES", [draw for draw in every if draw.__name__ not in seen]
        )
        renamed = [copy.deepcopy(run) for run in runs]
        for run in renamed:
            settings, start = run.metadata["settings"], run.label.partition(" ")[2]
            run.metadata["device"], settings["model"]["name"], settings["bench"]["name"] = (
                ODD,
                ODD,
                ODD,
            )
            if (name := settings["method"]["name"]) not in ("hf", "vanilla", "recycling"):
                settings["method"]["name"] = f"{ODD}{name}"
                run.metadata["label"] = f"{ODD}{name} {start}"
            settings["method"]["drafter"] = f"{ODD}{settings['method'].get('k')}"
            for row in run.answers:
                row["category"] = f"{ODD} {row['category']}"
                row["choices"][0] |= {
                    "phase_time": [{"draft": 0.2, "forward": 0.4}],
                    "forwards": [3],
                }
        figures.draw_all(Experiment(renamed), tmp_path / what)
        for path in (tmp_path / what).iterdir():
            shown = minidom.parse(str(path)).toxml()
            assert DRAWN.split()[0] in shown, "a name is a comment of its glyphs"
            seen.add(path.stem)
    assert seen == {draw.__name__ for draw in (*every, *across)}
    assert not [str(warning.message) for warning in recwarn if "lyph" in str(warning.message)]
    (data,) = split(Experiment(renamed)).values()
    assert figures.mat(data).axes[0].get_yticklabels()[0].get_text() == f" {DRAWN}m0 (hot)"
    (legend,) = figures.accepted_lengths(data).legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f" {DRAWN}m{i} (hot)" for i in range(8)
    ]
    assert data.measured == f" {DRAWN} (float32) on {DRAWN}; {DRAWN}"
