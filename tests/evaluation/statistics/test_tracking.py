"""The table in a tracker and in Parquet: what is there is what the table says."""

import math
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pandas as pd
import pytest

from evaluation import report
from evaluation.records.runs import read_runs
from evaluation.statistics.exports import track, tracked, turns_table, write_parquet
from evaluation.statistics.tables import main_table
from model.errors import UserError
from tests.evaluation.made_runs import answer, made


def needs(package):
    """A test that is left out where this is not installed."""
    missing = pytest.mark.skipif(find_spec(package) is None, reason="optional: requirements-extras.txt")
    return lambda test: pytest.mark.extras(missing(test))


@pytest.fixture
def runs():
    """Plain decoding and a method on two subtasks, one of two turns."""
    turns = [([1, 1, 1], 3.0), ([1, 1], 2.0)]
    plain = [answer(1, "qa", turns), answer(2, "rag", [([1, 1, 1, 1], 4.0)])]
    own = [answer(1, "qa", [([2, 1], 1.5), ([2], 1.0)]), answer(2, "rag", [([4], 1.0)])]
    return [made("vanilla", plain), made("recycling (hot)", own, method={"name": "recycling", "k": 8})]


@pytest.fixture
def table(runs):
    return main_table(runs)


def test_a_run_a_configuration(runs, table):
    plain, own = tracked(runs, table, "toy")
    assert own.key != plain.key and own.key != list(tracked(runs, table, "other"))[1].key
    assert own.metrics["mat"] == 9 / 4 and own.metrics["rag/mat"] == 4 and own.metrics["qa/mat"] == 5 / 3
    assert plain.metrics["mat"] == 1 and own.settings["label"] == "recycling (hot)" and own.settings["method.k"] == 8
    assert own.metrics["rag/speedup_vanilla"] == 4
    assert all(math.isfinite(value) for one in (plain, own) for value in one.metrics.values())
    assert not {name for name in own.settings if "mat" in name.split(".") or (name in table and name.endswith("_ms"))}


def test_a_configuration_stays_itself_beside_others(runs):
    """Its words in a table depend on its neighbours; a quantised model is another one, whatever the table says."""
    (_, own) = tracked(runs, main_table(runs), "toy")
    more = [*runs, made("recycling (hot)", runs[1].answers, method={"name": "recycling", "k": 4}, folder="other")]
    assert [one.key for one in tracked(more, main_table(more), "toy")][1:].count(own.key) == 1
    int8 = [made("vanilla", runs[0].answers, model={"quantize": "int8"})]
    (quantised,) = tracked(int8, main_table(int8), "toy")
    assert quantised.key != next(tracked(runs, main_table(runs), "toy")).key
    assert quantised.settings["model.quantize"] == "int8"


@needs("mlflow")
def test_mlflow_has_it_once(runs, table, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a server or a database elsewhere
    import mlflow

    for _ in range(2):
        assert track(runs, table, "mlflow", "toy") == 2
    found = mlflow.search_runs(experiment_names=["token-recycling/toy"])
    assert len(found) == 2
    (row,) = [row for _, row in found.iterrows() if row["params.label"] == "recycling (hot)"]
    assert row["metrics.mat"] == 9 / 4 and row["metrics.rag/mat"] == 4 and row["params.method.k"] == "8"


@needs("wandb")
def test_wandb_without_a_network(runs, table, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert track(runs, table, "wandb", "toy") == 2
    for one in tracked(runs, table, "toy"):
        (file,) = tmp_path.glob(f"wandb/offline-run-*-{one.key}/run-{one.key}.wandb")
        until = time.monotonic() + 20
        while b"rag/mat" not in (held := file.read_bytes()) and time.monotonic() < until:
            time.sleep(0.05)  # a process of its own writes it
        assert b"rag/mat" in held and str(one.metrics["mat"]).encode() in held


@needs("mlflow")
def test_what_a_tracker_refuses_is_one_line(runs, table, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    with pytest.raises(UserError, match="tracking=mlflow: nothing more was sent"):
        track(runs, table, "mlflow", "toy")


@needs("mlflow")
def test_a_refusal_ends_the_command_with_its_results_kept(evaluate, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    outcome = evaluate("method=vanilla", "tracking=mlflow", "bench.per_category=1")
    assert outcome.code == 2 and outcome.err.count("error:") == 1 and "tracking=mlflow" in outcome.err
    assert "the results are in" in outcome.err and list(tmp_path.rglob("tables/main.csv"))


def test_a_tracker_that_is_not_there(evaluate, tmp_path, monkeypatch):
    for found in (None, SimpleNamespace(origin=None)):  # the other one is a folder, as wandb leaves one
        monkeypatch.setattr("evaluation.configuration.config.find_spec", lambda name, found=found: found)
        outcome = evaluate("method=vanilla", "tracking=wandb")
        assert outcome.code == 2 and "tracking=wandb: is not installed; pip install -r requirements" in outcome.err
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    there = {"mlflow": SimpleNamespace(origin="x"), "wandb": SimpleNamespace(origin="x")}
    monkeypatch.setattr("evaluation.configuration.config.find_spec", there.get)
    assert "tracking=mlflow: say where in MLFLOW_TRACKING_URI" in evaluate("method=vanilla", "tracking=mlflow").err
    told = evaluate("method=vanilla", "tracking=wandb", f"run_dir={tmp_path / 'one'}").err
    assert "with run_dir there is none" in told
    assert evaluate("method=vanilla", "bench.per_category=1").code == 0
    outcome = evaluate("method=vanilla", "bench.per_category=1", "tracking=excel")
    assert outcome.code == 2 and "tracking=excel" in outcome.err and "configurations" not in outcome.out


@needs("pyarrow")
def test_parquet_holds_every_turn(evaluate, call, tmp_path):
    assert evaluate("-m", "method=vanilla,recycling", "num_choices=2", "sampling.temperature=0.8").code == 0
    folder = tmp_path / "results/default"
    outcome = call(report.main, folder, "--parquet", tmp_path / "parquet")
    assert outcome.code == 0 and "turns.parquet" in outcome.out
    turns, main = (pd.read_parquet(tmp_path / f"parquet/{name}.parquet") for name in ("turns", "main"))
    pd.testing.assert_frame_equal(turns[["run", "stop"]], turns_table(read_runs(folder))[["run", "stop"]])
    assert len(turns) == 2 * 2 * 8, "two methods, two choices, seven questions, one of them in two turns"
    assert (turns["accept_lengths"].map(sum) == turns["new_tokens"]).all()
    assert (turns["accept_lengths"].map(len) == turns["steps"]).all()
    whole = main[main["category"] == "overall"].set_index("method")
    for method, own in turns.groupby("method"):
        assert own["new_tokens"].sum() == whole.loc[method, "new_tokens"]
        assert own["new_tokens"].sum() / own["steps"].sum() == pytest.approx(whole.loc[method, "mat"])


def test_parquet_without_pyarrow(evaluate, call, tmp_path, monkeypatch):
    assert evaluate("method=vanilla").code == 0
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    outcome = call(report.main, tmp_path / "results/default", "--parquet", tmp_path / "parquet")
    assert outcome.code == 2 and "--parquet: needs pyarrow" in outcome.err
    assert "with an experiment's folder only" in call(report.main, "--answers", "x*", "--parquet", "y").err


@needs("pyarrow")
def test_questions_named_by_numbers_and_by_texts(tmp_path):
    runs = [made("vanilla", [answer(name, "qa", [([1], 1.0)])], folder=str(name)) for name in (1, "a")]
    write_parquet(runs, main_table(runs), tmp_path)
    assert list(pd.read_parquet(tmp_path / "turns.parquet")["question_id"]) == ["1", "a"]
