"""Runs that take turns question by question: the same answers as one after the other, wherever they were cut."""

import gc
import json
import re
import weakref
from pathlib import Path

import pytest
import torch

from evaluation.loading import models
from evaluation.records.runs import read_runs
from evaluation.records.sweeps import missing_jobs
from evaluation.running import runner, scheduling
from evaluation.running.scheduling import Job, grouped
from model.engine import Target
from model.errors import UserError
from tests.evaluation.running.test_run import core

ROOT = Path(__file__).resolve().parents[3]
SWEEP = (
    "-m",
    "method=hf,vanilla,pld,recycling",
    "start=cold,hot,category",
    "bench.end=4",
    "max_new_tokens=6",
)


def order_of_answers(folder: Path) -> list[tuple[int, str]]:
    """(question, label) in the order of their answers."""
    rows = [
        (r["tstamp"], r["question_id"], run.label) for run in read_runs(folder) for r in run.answers
    ]
    return [row[1:] for row in sorted(rows)]


def records(folder: Path) -> dict:
    return {
        (run.folder.name, run.repeat): (run.label, core(run.answers))
        for run in read_runs(folder)
    }


def states(folder: Path) -> dict:
    return {path.parent.name: path.read_bytes() for path in folder.glob("runs/*/state.safetensors")}


def test_methods_take_turns_and_an_interrupted_sweep_goes_on_to_the_same_answers(
    evaluate, tmp_path, monkeypatch
):
    """Method after method, a machine that got slower meanwhile had favoured the first ones."""
    results = tmp_path / "results"
    assert evaluate(*SWEEP, "name=plain").code == 0
    name = f"results_dir={tmp_path / 'turns'}"
    real, left = runner.answer, [8]

    def interrupted(*arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(*arguments)

    monkeypatch.setattr(runner, "answer", interrupted)
    outcome = evaluate(*SWEEP, "name=plain", name, "interleave=true")
    assert outcome.code == 130 and "goes on from there" in outcome.err
    folder = tmp_path / "turns/plain"
    assert sorted(len(run.answers) for run in read_runs(folder)) == [1, 1, 1, 1, 2, 2], (
        "what was done is kept"
    )
    monkeypatch.setattr(runner, "answer", real)
    monkeypatch.setattr(scheduling, "LOG_SECONDS", 0.0)
    outcome = evaluate(*SWEEP, "name=plain", name, "interleave=true")
    assert outcome.code == 0, outcome.err
    counted = re.findall(r"(\d+) of 24 answers, .* left$", outcome.err, flags=re.M)
    assert counted == [str(n) for n in range(9, 25)]
    turns = order_of_answers(folder)
    assert [turn[0] for turn in turns] == [10] * 6 + [11] * 6 + [12] * 6 + [13] * 6, (
        "question by question"
    )
    assert len({turn[1] for turn in turns[:6]}) == 6
    assert records(folder) == records(results / "plain") and states(folder) == states(
        results / "plain"
    )
    assert len(states(folder)) == 2 and not missing_jobs(folder)
    times = {
        path.name: [p.stat().st_mtime_ns for p in path.iterdir()]
        for path in (folder / "runs").iterdir()
    }
    assert evaluate(*SWEEP, "name=plain", name, "interleave=true").code == 0
    assert times == {
        path.name: [p.stat().st_mtime_ns for p in path.iterdir()]
        for path in (folder / "runs").iterdir()
    }


def test_one_that_fails_leaves_the_others_alone_and_is_told_at_the_end(
    evaluate, tmp_path, monkeypatch
):
    real = runner.answer

    def failing(questions, methods):
        if methods[0][0].settings["name"] == "pld" and questions[0].question_id == 11:
            raise UserError("pld has had enough")
        return real(questions, methods)

    monkeypatch.setattr(runner, "answer", failing)
    sweep = (
        "-m",
        "method=vanilla,pld,recycling",
        "method.k=4,8",
        "bench.end=3",
        "max_new_tokens=8",
    )
    outcome = evaluate(*sweep, "interleave=true", "name=f")
    assert outcome.code == 2 and outcome.err.count("error:") == 1
    assert "pld has had enough" in outcome.err and "k=4" in outcome.err, (
        "one that cannot be built, too"
    )
    done = {run.label: len(run.answers) for run in read_runs(tmp_path / "results/f")}
    assert done == {"vanilla": 3, "pld": 1, "recycling (cold)": 3}
    assert missing_jobs(tmp_path / "results/f").startswith("missing: 1 of ")
    monkeypatch.setattr(runner, "answer", lambda questions, methods: {}["a defect of ours"])
    with pytest.raises(KeyError, match="a defect of ours"):
        evaluate(*sweep, "interleave=true", "name=defect")


def test_each_answers_with_its_own_execution(evaluate, tmp_path, monkeypatch):
    seen = set()
    real = runner.answer

    def noting(question, methods):
        seen.add((methods[0][1]["execution"], methods[0][0].execution))
        return real(question, methods)

    monkeypatch.setattr(runner, "answer", noting)
    monkeypatch.setattr("model.tuning.EXECUTIONS", ("eager", "static"))
    sweep = (
        "-m",
        "method=recycling",
        "execution=eager,static",
        "start=hot",
        "bench.end=3",
        "max_new_tokens=12",
    )
    assert evaluate(*sweep, "interleave=true", "name=e").code == 0
    assert seen == {("eager", "eager"), ("static", "static")}
    (_, one), (_, two) = records(tmp_path / "results/e").values()
    assert one == two
    recorded = [
        json.loads(path.read_text())
        for path in (tmp_path / "results/e").glob("runs/*/metadata.json")
    ]
    assert {(m["config"]["execution"], m["execution_used"]) for m in recorded} == {
        ("eager",) * 2,
        ("static",) * 2,
    }


def test_no_room_for_the_cache_is_told_and_the_next_group_goes_on(evaluate, tmp_path, monkeypatch):
    reserve, sizes = Target.reserve, []

    def full(self, nodes):
        sizes.append(nodes)
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("no room")
        reserve(self, nodes)

    monkeypatch.setattr(Target, "reserve", full)
    sweep = (
        "-m",
        "method=vanilla,recycling",
        "bench.end=1",
        "max_new_tokens=8",
        "repeats=2",
        "interleave=true",
    )
    outcome = evaluate(*sweep, "name=r")
    assert outcome.code == 2 and outcome.err.count("out of device memory") == 1
    finished = [
        path.parent / "metadata.json"
        for path in (tmp_path / "results/r").glob("runs/*/summary.json")
    ]
    assert [json.loads(path.read_text())["config"]["repeat"] for path in finished] == [1, 1]


@pytest.mark.slow
def test_no_run_keeps_a_model_while_the_next_one_is_loaded(evaluate, monkeypatch):
    """Two models need not fit into memory, neither while jobs are checked nor later."""
    load, loaded = models._load, []

    def alone(settings):
        gc.collect()
        assert not [model for model in loaded if model() is not None]
        model = load(settings)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(models, "_load", alone)
    sweep = (
        "-m",
        "method=vanilla,recycling",
        "model.context=256,128,200",
        "bench.end=1",
        "max_new_tokens=4",
    )
    assert evaluate(*sweep, "name=alone").code == 0 and len(loaded) == 11


def test_several_runs_want_several_folders(evaluate, tmp_path):
    sweep = ("-m", "method=vanilla,pld", "bench.end=1", "max_new_tokens=8", "interleave=true")
    assert "run_dir=" in evaluate(*sweep, f"run_dir={tmp_path}/one").err
    one = ("method=vanilla", *sweep[2:], f"run_dir={tmp_path}/two", "repeats=2")
    assert "repeats=2" in evaluate(*one).err and evaluate(*one, "repeat=1").code == 0


def test_what_takes_turns_is_of_one_model_bench_and_repeat():
    def job(method, **more):
        config = {"repeat": None, "repeats": 2, "timed": True, "interleave": True, "method": method}
        return Job(
            config | {"model": {"name": "a"}, "bench": {"name": "b", "order": "file"}} | more
        )

    jobs = [
        job("one"),
        job("two", bench={"name": "b", "order": "shuffled"}),
        job("three", repeat=1),
        job("four", model={"name": "c", "path": "c"}),
    ]
    assert [
        [(job.config["method"], job.config["repeat"]) for job in group] for group in grouped(jobs)
    ] == [
        [("one", 0), ("two", 0)],
        [("four", 0)],
        [("one", 1), ("two", 1), ("three", 1)],
        [("four", 1)],
    ]
