"""Sweeps: repeats apart and in turns, settings only where a method has them, what is missing and what completes it."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from evaluation import report
from evaluation.loading.bench import ordered
from evaluation.records.rows import Question
from evaluation.records.runs import read_runs
from evaluation.records.store import missing_jobs
from evaluation.statistics.pools import pools
from model.errors import UserError
from tests.evaluation.conftest import answers_in


def test_repeats_are_runs_of_their_own_and_methods_take_turns(evaluate, tmp_path):
    few = ("method.k=8,9", "repeats=2", "bench.end=2", "name=r")
    assert evaluate("-m", "method=vanilla,recycling", *few).code == 0
    runs = sorted(read_runs(tmp_path / "results/r"), key=lambda run: run.answers[0]["tstamp"])
    labels = ["vanilla", "recycling (cold)", "recycling (cold)"]
    assert [(run.label, run.settings["repeat"]) for run in runs] == [
        (label, repeat) for repeat in (0, 1) for label in labels
    ], "repeat by repeat, not method by method"
    table = pd.read_csv(tmp_path / "results/r/tables/main.csv")
    overall = table[table["category"] == "overall"]
    assert overall["repeats"].tolist() == [2, 2, 2] and overall["speedup_vanilla_std"].notna().all()
    assert overall["k"].tolist()[1:] == [8, 9]


def test_a_half_finished_sweep_says_what_is_missing_and_what_completes_it(evaluate, call, tmp_path):
    arguments = ("-m", "method=vanilla,pld", "repeats=2", "bench.end=3", "name=half")
    assert evaluate(*arguments).code == 0
    folder = tmp_path / "results/half"
    assert not missing_jobs(folder)
    runs = {(run.label, run.settings["repeat"]): run.folder for run in read_runs(folder)}
    shutil.rmtree(runs["pld", 1])
    answers = runs["vanilla", 1] / "answers.jsonl"
    answers.write_text(answers.read_text().splitlines(keepends=True)[0])
    (runs["vanilla", 1] / "summary.json").unlink()
    outcome = call(report.main, folder)
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("missing: 2 of 4 jobs")]
    assert "method=pld" in line and "evaluation.run -m " in line and line.endswith("name=half")
    assert "incomplete: vanilla, repeat 1: 1 of 3 questions" in outcome.out
    assert evaluate(*arguments).code == 0 and not missing_jobs(folder)
    assert {len(run.answers) for run in read_runs(folder)} == {3}
    assert evaluate(*arguments).err.count("was finished already") == 4


def test_a_job_that_is_asked_anew_and_fails_is_missing(evaluate, bench_file, tmp_path):
    """Its mark of an earlier sweep said that it was done: the table was one of the old questions."""
    bench = Path(shutil.copy(bench_file, tmp_path))
    sweep = ("-m", "method=vanilla,pld", "name=again", "bench.end=1", f"bench.path={bench}")
    assert evaluate(*sweep).code == 0 and not missing_jobs(tmp_path / "results/again")
    bench.unlink()
    assert evaluate(*sweep).code == 2
    assert missing_jobs(tmp_path / "results/again").startswith("missing: 2 of 2 jobs")


def test_an_impossible_combination_is_said_before_the_run_and_left_out(evaluate, tmp_path):
    few = ("-m", "method=vanilla,recycling", "bench.end=1", "timed=false", "name=wide")
    outcome = evaluate(*few, "method.k=4,8")
    lines = [line.strip() for line in outcome.err.splitlines()]
    assert outcome.code == 0 and lines[0] == "not available, 1 of 3 jobs are left out:"
    assert lines[1] == "recycling: tree=2.2.2 needs method.k=8 or more, and here k=4"
    folder = tmp_path / "results/wide"
    assert not missing_jobs(folder) and len(read_runs(folder)) == 2


def test_orders_of_a_bench():
    categories = ["math", "writing", "qa", "qa", "rag", "math"]
    questions = [Question(i, category, ("x",)) for i, category in enumerate(categories)]

    def ids(order):
        return [question.question_id for question in ordered(questions, order)]

    assert ids("file") == [0, 1, 2, 3, 4, 5] and ids("interleaved") == [0, 2, 4, 1, 3, 5]
    assert ids("shuffled") == ids("shuffled-0") != ids("shuffled-1")
    for order in ("sorted", "shuffled-x", "file-1"):
        with pytest.raises(UserError, match=f"bench.order={order}"):
            ordered(questions, order)


def test_category_forgets_where_the_subtask_changes(evaluate, tmp_path):
    # the first two questions are of one subtask, the others of one each
    rows = {}
    for start in ("cold", "hot", "category"):
        assert evaluate(f"start={start}", f"run_dir={tmp_path / start}").code == 0
        rows[start] = [row["choices"][0]["step_paths"] for row in answers_in(tmp_path / start)]
    assert rows["category"][:2] == rows["hot"][:2]
    assert rows["category"][2:] == rows["cold"][2:] != rows["hot"][2:]


def test_on_a_launcher_too_hot_runs_come_before_those_of_their_states(evaluate, tmp_path):
    """Hydra's own, by another name: only `basic` is passed by."""
    folder = tmp_path / "configs/hydra/launcher"
    folder.mkdir(parents=True)
    target = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
    (folder / "own.yaml").write_text(f"_target_: {target}\n")
    words = (f"--config-dir={tmp_path / 'configs'}", "hydra/launcher=own", "timed=false", "name=l")
    outcome = evaluate("-m", "start=saved,hot", *words, "bench.end=1")
    assert outcome.code == 0, outcome.err
    assert len(read_runs(tmp_path / "results/l")) == 2


def test_a_saved_start_is_the_hot_runs_state(evaluate, tmp_path):
    assert evaluate("-m", "start=hot,saved", "name=s", "repeats=2").code == 0
    found = read_runs(tmp_path / "results/s")
    steps = {}
    for one in found:
        lengths = [row["choices"][0]["accept_lengths"] for row in one.answers]
        steps[one.label] = sum(map(len, lengths))
        if one.label == "recycling (saved)":
            state = Path(one.settings["method"]["start"])
            metadata = json.loads((state.parent / "metadata.json").read_text())
            assert metadata["settings"]["repeat"] == one.settings["repeat"]
    assert steps["recycling (saved)"] < steps["recycling (hot)"], "on the same questions"
    assert [len(pool.runs) for pool in pools(found)] == [2, 2]
    assert "start=hot,saved" in evaluate("start=saved", "name=alone").err


def test_parts_of_a_step_are_timed_on_request(evaluate, drawn, tmp_path):
    assert evaluate("method=recycling", "phases=true", "bench.end=1", "name=p").code == 0
    (row,) = answers_in(tmp_path / "results/p")
    for phases in row["choices"][0]["phase_time"]:
        assert {"draft", "forward", "verify", "commit", "observe", "loop"} <= phases.keys()
    assert row["peak_memory"] > 2**20
    table = pd.read_csv(tmp_path / "results/p/tables/main.csv")
    assert (table[["part_draft_ms", "part_forward_ms", "part_loop_ms"]] > 0).all(axis=None)


def test_a_single_run_leaves_the_list_of_a_sweep_into_the_same_folder(evaluate, tmp_path):
    assert evaluate("method=vanilla,pld", "bench.end=1", "name=both").code == 0
    file = tmp_path / "results/both/sweep.json"
    before = file.read_bytes()
    assert evaluate("method=vanilla", "bench.end=1", "repeats=0", "name=both").code != 0
    assert evaluate("method=suffix", "bench.end=1", "name=both").code == 0
    assert file.read_bytes() == before
