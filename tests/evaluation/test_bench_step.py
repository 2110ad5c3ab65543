"""The step bench as a command, its derived columns."""

import json
from importlib.metadata import version
from itertools import product

import pytest

from evaluation import bench_step
from model.tuning import Execution


@pytest.mark.parametrize(
    "wrong, said",
    [
        (["--shape", "huge"], "--shape huge: unknown; use vicuna-7b"),
        (
            ["--shape", "tiny", "model=embedded"],
            "model=embedded: --shape tiny takes random weights",
        ),
        (["model=nothing"], "Could not find 'model/nothing'"),
        (["model=path", "model.path=nowhere/at/all"], "model nowhere/at/all: no such folder"),
        (["model.dtype=float8"], "model.dtype=float8: use one of auto, float32"),
        (["bench=sample"], "bench=sample: only model=NAME and model.KEY=VALUE count here"),
        (["--nodes", "1,x"], "--nodes 1,x: must be whole numbers"),
        (["--batch", "0"], "--batch 0: must be whole numbers from 1 to 512"),
        (["model.context=0"], "context=0: must be at least 2"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--shape", "tiny", "--context", "4096"], "--context 4096: must be from 2 to "),
    ],
)
def test_a_wrong_flag_is_one_line(call, wrong, said):
    outcome = call(bench_step.main, *wrong)
    assert outcome.code == 2 and said in outcome.err and outcome.err.count("\n") == 1


def test_what_the_trial_refused_is_said_and_not_timed(call, monkeypatch):
    """`generate` with compiled steps and the floor are timed, as they need no steps of ours."""
    refused = Execution("eager", "graph failed its trial: its text is not eager decoding's")
    monkeypatch.setattr(bench_step, "captures", lambda target: True)
    monkeypatch.setattr(bench_step, "choose_execution", lambda target: refused)
    monkeypatch.setattr(bench_step, "LARGE", 1 << 16)
    words = ["--shape", "tiny", "--nodes", "3", "--context", "20", "--rounds", "1"]
    outcome = call(bench_step.main, *words)
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    assert result["trial"] == refused.why and refused.why in outcome.out
    assert [row["execution"] for row in result["steps"]] == ["eager"] * 2
    assert result["hf_compiled_s"] > 0 < result["floor_s"]["weights"]


@pytest.mark.parametrize("method", bench_step.METHODS)
def test_a_table_and_one_json_object(call, method):
    words = ["--shape", "tiny", "model.dtype=bfloat16", "--nodes", "3,1", "--batch", "1,3"]
    outcome = call(bench_step.main, *words, "--context", 20, "--rounds", 1, "--method", method)
    assert outcome.code == 0, outcome.err
    *table, last = outcome.out.splitlines()
    result = json.loads(last)
    assert result["method"] == method
    assert result["context"] == 20 and result["model"]["dtype"] == "bfloat16"
    assert result["device"] and result["versions"]["torch"] == version("torch")
    steps = result["steps"]
    assert [(row["batch"], row["nodes"]) for row in steps] == [*product((1, 3), (0, 1, 3))]
    for row in steps:
        plain = next(one for one in steps if one["batch"] == row["batch"])
        assert row["over_plain"] == row["seconds"] / plain["seconds"] > 0
        cells = [f"{1e3 * row['seconds']:.3f}", f"{row['over_plain']:.2f}"]
        assert any(line.split()[:3] == [str(row["nodes"]), *cells] for line in table)
