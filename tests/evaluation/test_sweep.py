"""The harness as a function, beside its command line."""

import json

import pandas as pd
import pytest

from evaluation import sweep
from model.errors import UserError

COLUMNS = ["method", "variant", "category", "questions", "new_tokens", "steps", "mat"]


@pytest.fixture
def toy(checkpoint, bench_file, tmp_path):
    """`evaluate` of the toy model on the toy bench."""
    base = {"model": str(checkpoint), "bench": str(bench_file), "model__name": "toy"}
    base |= {"max_new_tokens": 12, "results_dir": tmp_path / "results"}

    def measured(method="recycling", **settings):
        return sweep.evaluate(method=method, **base | settings)

    return measured


def test_the_command_and_the_function_measure_the_same(evaluate, toy, tmp_path, capsys):
    """What the command has run the function reads, what it has not it runs; the table is the report's."""
    words = ["method=vanilla,recycling", "start=hot", "method.k=4,8", "tree=best"]
    outcome = evaluate("-m", *words, "tree.nodes=6", "name=both", "interleave=true")
    assert outcome.code == 0, outcome.err
    runs = tmp_path / "results/both/runs"
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("answers.jsonl")}
    settings = dict(start="hot", method__k=[4, 8], tree="best", tree__nodes=6)
    frame = toy(["vanilla", "recycling"], **settings, name="both")
    assert "ignored: start by vanilla\n" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("answers.jsonl")} == before
    table = pd.read_csv(tmp_path / "results/both/tables/main.csv", keep_default_na=False)
    assert len(before) == 3 and len(table) > 18
    for column in ("method", "category", "steps"):
        assert list(frame[column]) == list(table[column])
    again = toy(["vanilla", "recycling"], **settings, name="fresh")
    files = (tmp_path / "results/fresh/runs").rglob("answers.jsonl")
    stamps = [[json.loads(line)["tstamp"] for line in file.open()][:2] for file in files]
    first, second = zip(*stamps, strict=True)
    assert max(first) < min(second), "they take turns"
    pd.testing.assert_frame_equal(again[COLUMNS], frame[COLUMNS])


def test_lists_groups_and_odd_names(toy, tmp_path):
    settings = {"bench__categories": [["qa", "rag"]], "sampling": {"temperature": 1.0}}
    frame = toy("vanilla", **settings, name="it's 1", timed=False)
    assert set(frame["category"]) == {"qa", "rag", "overall"} and (frame["temperature"] == 1).all()
    for name, nodes in (("a", "[[0]]"), ("b", "[[0], [1], [0, 0]]")):
        (tmp_path / f"{name}.yaml").write_text(nodes)
    paths = [str(tmp_path / f"{name}.yaml") for name in "ab"]
    frame = toy(tree="file", tree__path=paths, bench__end=1, timed=False, name=2026)
    assert sorted(frame[frame["category"] == "overall"]["tree_nodes"]) == [1, 3]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "magic"}, "method/magic"),
        ({"bench": "/nowhere.jsonl"}, "question file /nowhere.jsonl does not exist"),
        ({"experiment": "order"}, "experiment: is for the command line"),
        ({"method": []}, "method: an empty list"),
    ],
)
def test_a_mistake_is_one_line(toy, settings, says):
    with pytest.raises(UserError) as error:
        toy(**settings)
    assert says in str(error.value) and "\n" not in str(error.value)
