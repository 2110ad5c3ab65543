"""Sweeps: repeats apart and in turns, settings only where a method has them, what is missing and what completes it."""

import importlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from hydra.core.plugins import Plugins

from evaluation import report, run
from evaluation.loading.bench import ordered
from evaluation.records.questions import Question
from evaluation.records.runs import read_runs
from evaluation.records.sweeps import missing_jobs
from evaluation.statistics.pools import pools
from model.errors import UserError
from tests.evaluation.conftest import answers_in


def test_repeats_are_runs_of_their_own_and_methods_take_turns(evaluate, tmp_path):
    outcome = evaluate(
        "-m", "method=vanilla,recycling", "method.k=8,9", "repeats=2", "bench.end=2", "name=r"
    )
    assert outcome.code == 0, outcome.err
    runs = read_runs(tmp_path / "results/r")
    assert len(runs) == 6 and sorted(run.repeat for run in runs) == [0, 0, 0, 1, 1, 1]
    begun = sorted(runs, key=lambda run: run.answers[0]["tstamp"])
    first = ["vanilla", "recycling (cold)", "recycling (cold)"]
    assert [run.label for run in begun] == first * 2, "repeat by repeat, not method by method"
    table = pd.read_csv(tmp_path / "results/r/tables/main.csv")
    overall = table[table["category"] == "overall"]
    assert overall["repeats"].tolist() == [2, 2, 2] and overall["speedup_vanilla_std"].notna().all()
    assert overall["k"].tolist()[1:] == [8, 9]


def test_a_half_finished_sweep_says_what_is_missing_and_what_completes_it(evaluate, call, tmp_path):
    arguments = ("-m", "method=vanilla,pld", "repeats=2", "bench.end=3", "name=half")
    assert evaluate(*arguments).code == 0
    folder = tmp_path / "results/half"
    assert not missing_jobs(folder)
    whole = pd.read_csv(folder / "tables/main.csv")
    gone = next(run for run in read_runs(folder) if run.label == "pld" and run.repeat == 1)
    shutil.rmtree(gone.folder)
    cut = next(
        run for run in read_runs(folder) if run.label == "vanilla" and run.repeat == 1
    )
    lines = (cut.folder / "answers.jsonl").read_text().splitlines(keepends=True)
    (cut.folder / "answers.jsonl").write_text(lines[0])
    (cut.folder / "summary.json").unlink()
    outcome = call(report.main, folder)
    assert (
        outcome.code == 0 and "missing: 2 of 4 jobs" in outcome.out and "method=pld" in outcome.out
    )
    assert "incomplete: vanilla, repeat 1: 1 of 3 questions" in outcome.out
    assert "missing: 2 of 4 jobs" in (folder / "tables/main.md").read_text()
    line = next(line for line in outcome.out.splitlines() if line.startswith("missing"))
    assert line.endswith("name=half") and "bash eval.sh -m " in line
    assert evaluate(*arguments).code == 0 and not missing_jobs(folder)
    again = pd.read_csv(folder / "tables/main.csv")
    assert again[["method", "category", "mat", "repeats"]].equals(
        whole[["method", "category", "mat", "repeats"]]
    )


def test_a_job_that_is_asked_anew_and_fails_is_missing(evaluate, bench_file, tmp_path):
    """Its mark of an earlier sweep said that it was done: the table was one of the old questions, without a word."""
    bench = Path(shutil.copy(bench_file, tmp_path))
    sweep = (
        "-m",
        "method=vanilla,pld",
        "name=again",
        "max_new_tokens=4",
        "bench.end=1",
        f"bench.path={bench}",
    )
    assert evaluate(*sweep).code == 0 and not missing_jobs(tmp_path / "results/again")
    bench.unlink()
    assert evaluate(*sweep).code == 2
    assert missing_jobs(tmp_path / "results/again").startswith("missing: 2 of 2 jobs")


def test_an_impossible_combination_is_said_before_the_run_and_left_out(evaluate, tmp_path):
    """It was a failure after all others."""
    outcome = evaluate(
        "-m", "method=vanilla,recycling", "method.k=4,8", "bench.end=1", "timed=false", "name=wide"
    )
    lines = [line.strip() for line in outcome.err.splitlines()]
    assert outcome.code == 0 and lines[0] == "not available, 1 of 3 jobs are left out:"
    assert lines[1] == "recycling: tree=2.2.2 needs method.k=8 or more, and here k=4"
    assert (
        not missing_jobs(tmp_path / "results/wide")
        and len(read_runs(tmp_path / "results/wide")) == 2
    )
    outcome = evaluate(
        "-m", "method=vanilla,recycling", "k=x", "bench.end=1", "timed=false", "name=wrong"
    )
    assert outcome.code == 2 and outcome.err.startswith(
        "left out: method.k=x: must be a whole number\n"
    )


def test_runs_that_start_from_a_saved_state_come_when_all_others_are_done(evaluate, monkeypatch):
    """Beside their hot runs on a launcher that starts all jobs at once, they found no state."""
    batches = []
    Plugins.instance()  # imports its plugins anew, once
    launcher = importlib.import_module("hydra._internal.core_plugins.basic_launcher").BasicLauncher
    job = SimpleNamespace(return_value=["what a job could not do"])
    monkeypatch.setattr(
        launcher, "launch", lambda self, jobs, initial_job_idx: batches.append(jobs) or [job, job]
    )
    monkeypatch.setattr(run, "BASIC", "another")
    outcome = evaluate("-m", "start=saved,hot", "method=vanilla,recycling", "repeats=2")
    assert outcome.code == 2 and outcome.err == "error: what a job could not do\n"
    starts = [[next(o for o in job if o.startswith("start=")) for job in jobs] for jobs in batches]
    assert starts == [["start=hot"] * 4, ["start=saved"] * 4]
    batches.clear()
    evaluate("-m", "start=saved", "method=recycling")
    assert len(batches) == 1


def test_orders_of_a_bench():
    questions = [
        Question(i, c, ("x",)) for i, c in enumerate(["math", "writing", "qa", "qa", "rag", "math"])
    ]
    assert [q.question_id for q in ordered(questions, "interleaved")] == [0, 2, 4, 1, 3, 5]
    assert ordered(questions, "file") == tuple(questions)
    shuffles = [
        [q.question_id for q in ordered(questions, f"shuffled-{seed}")] for seed in (0, 0, 1)
    ]
    assert shuffles[0] == shuffles[1] != shuffles[2] and sorted(shuffles[0]) == list(range(6))
    assert ordered(questions, "shuffled") == ordered(questions, "shuffled-0")
    for order in ("sorted", "shuffled-x", "file-1"):
        with pytest.raises(UserError, match=f"bench.order={order}"):
            ordered(questions, order)


def test_category_forgets_where_the_subtask_changes(evaluate, tmp_path):
    # the first two questions are of one subtask, the others of one each: as cold from the third on, as hot before
    rows = {}
    for start in ("cold", "hot", "category"):
        assert evaluate(f"start={start}", f"run_dir={tmp_path / start}").code == 0
        rows[start] = [r["choices"][0]["step_paths"] for r in answers_in(tmp_path / start)]
    assert rows["category"][:2] == rows["hot"][:2]
    # one turn each from the third on: nothing is carried, so it is as a cold start
    assert rows["category"][2:] == rows["cold"][2:] != rows["hot"][2:]
    last = (
        "start=category",
        "bench.order=shuffled-7",
        "bench.end=3",
        f"run_dir={tmp_path / 'last'}",
    )
    assert evaluate(*last).code == 0  # those of one subtask come last
    assert [r["choices"][0]["step_paths"] for r in answers_in(tmp_path / "last")][1:] == rows[
        "hot"
    ][:2]


def test_a_saved_start_is_the_hot_runs_state(evaluate, tmp_path):
    outcome = evaluate("-m", "start=hot,saved", "name=s", "repeats=2")
    assert outcome.code == 0, outcome.err
    runs = {(run.label, run.repeat): run for run in read_runs(tmp_path / "results/s")}
    assert set(runs) == {
        (f"recycling ({start})", repeat) for start in ("hot", "saved") for repeat in (0, 1)
    }
    steps = {
        key: [c["accept_lengths"] for row in run.answers for c in row["choices"]]
        for key, run in runs.items()
    }
    assert steps["recycling (hot)", 0] == steps["recycling (hot)", 1], (
        "each repeat begins with a fresh state"
    )
    counts = [sum(map(len, steps[f"recycling ({start})", 0])) for start in ("saved", "hot")]
    assert counts[0] < counts[1], "what was learnt helps on the same questions"
    for repeat in (0, 1):
        start = runs["recycling (saved)", repeat].settings["method"]["start"]
        assert start == str(runs["recycling (hot)", repeat].folder / "state.safetensors")
    pooled = pools(list(runs.values()))
    assert sorted((pool.label, len(pool.runs)) for pool in pooled) == [
        ("recycling (hot)", 2),
        ("recycling (saved)", 2),
    ]
    assert "start=hot,saved" in evaluate("start=saved", "name=alone").err


def test_parts_of_a_step_are_timed_on_request(evaluate, drawn, tmp_path):
    assert evaluate("method=recycling", "phases=true", "bench.end=1", "name=p").code == 0
    (row,) = answers_in(tmp_path / "results/p")
    for phases in row["choices"][0]["phase_time"]:
        assert {"draft", "forward", "verify", "commit", "observe", "loop"} <= phases.keys()
    assert row["peak_memory"] > 2**20
    assert (tmp_path / "results/p/figures/overhead.svg").stat().st_size > 2000
