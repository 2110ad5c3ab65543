"""The harness as a function, beside its command line."""

import json

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from evaluation import sweep
from model.errors import UserError

COLUMNS = ["method", "variant", "category", "questions", "new_tokens", "steps", "mat"]


@pytest.fixture
def toy(checkpoint, bench_file, tmp_path):
    """`evaluate` of the toy model on the toy bench."""

    def measured(method="recycling", **settings):
        given = {
            "model": str(checkpoint),
            "bench": str(bench_file),
            "results_dir": tmp_path / "results",
        }
        return sweep.evaluate(
            method=method, **given | {"model__name": "toy", "max_new_tokens": 24} | settings
        )

    return measured


def test_the_command_and_the_function_measure_the_same(evaluate, toy, tmp_path):
    """What the command has run the function reads, what it has not it runs; the table is the report's."""
    sweep_of = [
        "method=vanilla,recycling",
        "start=cold,hot",
        "method.k=4,8",
        "tree=best",
        "tree.nodes=6",
    ]
    outcome = evaluate("-m", *sweep_of, "name=both", "interleave=true")
    assert outcome.code == 0, outcome.err
    answers = sorted((tmp_path / "results/both/runs").rglob("answers.jsonl"))
    before = [path.stat().st_mtime_ns for path in answers]
    methods = ["vanilla", "recycling"]
    settings = dict(
        start=["cold", "hot"], method__k=[4, 8], tree="best", tree__nodes=6, name="both"
    )
    frame = toy(methods, **settings)
    assert [path.stat().st_mtime_ns for path in answers] == before and len(answers) == 5
    assert sorted((tmp_path / "results/both/runs").rglob("answers.jsonl")) == answers
    table = pd.read_csv(tmp_path / "results/both/tables/main.csv", keep_default_na=False)
    key = ["method", "variant", "category"]
    returned, printed = (
        rows[COLUMNS].astype(str).sort_values(key).reset_index(drop=True) for rows in (frame, table)
    )
    assert (
        len(returned) > 30
        and list(returned["method"]) == list(printed["method"])
        and list(returned["steps"]) == list(printed["steps"])
    )
    again = toy(methods, **settings | {"name": "fresh"})
    files = (tmp_path / "results/fresh/runs").rglob("answers.jsonl")
    stamps = [[json.loads(line)["tstamp"] for line in file.open()] for file in files]
    assert max(first for first, *_ in stamps) < min(second for _, second, *_ in stamps), (
        "they take turns"
    )
    pd.testing.assert_frame_equal(again[COLUMNS], frame[COLUMNS])


def test_the_function_says_what_is_ignored(toy, capsys):
    toy(["vanilla", "recycling"], start="hot", bench__end=1)
    assert capsys.readouterr().err.count("ignored: start by vanilla\n") == 1


def test_a_callers_own_hydra_is_its_own_again(toy, tmp_path):
    """It was already initialized, which ended the measurement."""
    (tmp_path / "callers.yaml").write_text("answer: 42")
    with initialize_config_dir(str(tmp_path), version_base=None):
        assert len(toy("vanilla", timed=False)) and compose("callers").answer == 42


def test_lists_groups_and_odd_names(toy, tmp_path):
    frame = toy(
        "vanilla",
        bench__categories=[["qa", "rag"]],
        sampling={"temperature": 1.0},
        name="it's 1",
        timed=False,
    )
    assert set(frame["category"]) == {"qa", "rag", "overall"} and (frame["temperature"] == 1).all()
    assert (
        toy("vanilla", name=2026, timed=False)["questions"].max() == 7
        and (tmp_path / "results/2026").is_dir()
    )


def test_templates_of_ones_own_and_what_cannot_be(toy, tmp_path, capsys):
    files = [tmp_path / f"{name}.yaml" for name in "ab"]
    for file, nodes in zip(files, ("[[0]]", "[[0], [1], [0, 0]]"), strict=True):
        file.write_text(nodes)
    frame = toy(tree="file", tree__path=[str(file) for file in files], bench__end=1, timed=False)
    assert sorted(frame[frame["category"] == "overall"]["tree_nodes"]) == [1, 3]
    frame = toy(tree="2.2.2", method__k=[4, 8], bench__end=1, timed=False, name="k")
    assert (
        set(frame["k"]) == {8}
        and "tree=2.2.2 needs method.k=8 or more, and here k=4" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"method": "magic"}, "method/magic"),
        ({"bench": "/nowhere.jsonl"}, "question file /nowhere.jsonl does not exist"),
        ({"experiment": "order"}, "experiment: is for the command line"),
        ({"run_dir": "x"}, "run_dir: is for the command line"),
        ({"method": []}, "method: an empty list"),
        ({"nodes": 4}, "nodes: no such setting of a run; did you mean method.nodes or tree.nodes?"),
    ],
)
def test_a_mistake_is_one_line(toy, settings, says):
    with pytest.raises(UserError) as error:
        toy(**settings)
    assert says in str(error.value) and "\n" not in str(error.value)
