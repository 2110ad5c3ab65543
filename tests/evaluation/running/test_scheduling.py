"""Runs that take turns question by question: the same answers as one after the other, wherever they were cut."""

import re

import pytest
import torch

from evaluation.records.runs import read_runs
from evaluation.records.store import missing_jobs
from evaluation.running import runner, scheduling
from evaluation.running.scheduling import Job, grouped
from tests.evaluation.running.conftest import records, states

SWEEP = ("-m", "method=hf,vanilla,pld,recycling", "start=cold,hot,category", "bench.end=4")
SWEEP += ("max_new_tokens=6", "name=x")
LINE = re.compile(r"(\d+) of (\d+) answers, [^\r]* left")  # of progress in a log


def test_methods_take_turns_and_an_interrupted_sweep_goes_on_to_the_same_answers(
    evaluate, tmp_path, monkeypatch
):
    """Method after method, a machine that got slower meanwhile had favoured the first ones."""
    assert evaluate(*SWEEP).code == 0
    command = (*SWEEP, f"results_dir={tmp_path / 'turns'}", "interleave=true")
    left = iter(range(8))

    def interrupted(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(*arguments)

    real = runner.answer
    monkeypatch.setattr(runner, "answer", interrupted)
    outcome = evaluate(*command)
    assert outcome.code == 130 and "goes on from there" in outcome.err
    plain = tmp_path / "results/x"
    folder = tmp_path / "turns/x"
    assert sorted(len(run.answers) for run in read_runs(folder)) == [1, 1, 1, 1, 2, 2]

    monkeypatch.setattr(runner, "answer", real)
    monkeypatch.setattr(scheduling, "LOG_SECONDS", 0.0)
    outcome = evaluate(*command)
    assert outcome.code == 0, outcome.err
    counts = dict.fromkeys(done for done, _ in LINE.findall(outcome.err))
    assert [*counts] == [str(n) for n in range(9, 25)]
    asked = [(row["tstamp"], row["question_id"]) for run in read_runs(folder) for row in run.answers]  # fmt: skip
    in_order = [question for _, question in sorted(asked)]
    assert in_order == [10] * 6 + [11] * 6 + [12] * 6 + [13] * 6, "question by question"
    assert records(folder) == records(plain) and states(folder) == states(plain)
    assert len(states(folder)) == 2 and not missing_jobs(folder)


def test_untimed_runs_share_forwards_and_hold_the_same_answers_and_states(
    evaluate, tmp_path, monkeypatch
):
    sweep = ("-m", "method=hf,vanilla,recycling", "start=cold,hot", "bench.end=2")
    assert evaluate(*sweep, "max_new_tokens=10", "name=timed").code == 0
    monkeypatch.setattr(scheduling, "LOG_SECONDS", 0.0)
    outcome = evaluate(*sweep, "max_new_tokens=10", "name=untimed", "timed=false", "repeats=3")
    assert outcome.code == 0, outcome.err
    counts = dict.fromkeys(done for done, _ in LINE.findall(outcome.err))
    assert [*counts] == ["1", "4", "5", "8"], "all but hf's are shared, and there is one repeat"
    timed = tmp_path / "results/timed"
    untimed = tmp_path / "results/untimed"
    assert records(timed) == records(untimed) and states(timed) == states(untimed)
    assert not missing_jobs(untimed), "hf and vanilla are of two jobs each"
    choices = [row["choices"][0] for run in read_runs(untimed) for row in run.answers]
    times = ("prefill_time", "decode_time", "setup_time")
    assert all({*choice[key]} == {None} for choice in choices for key in times)
    table = (untimed / "tables/main.md").read_text(encoding="utf-8")
    assert "| MAT |" in table and "tokens/s" not in table and "not timed" in table


def test_untimed_runs_of_other_orders_limits_and_choices_answer_by_themselves(evaluate, tmp_path):
    few = ("method=vanilla,recycling", "start=hot", "timed=false", "bench.order=file,shuffled")
    assert evaluate("-m", *few, "bench.end=3", "max_new_tokens=8", "name=orders").code == 0
    runs = read_runs(tmp_path / "results/orders")
    ids = [[row["question_id"] for row in run.answers] for run in runs]
    assert sorted(ids) == [[10, 11, 12], [10, 11, 12], [10, 12, 11]], "vanilla has no order"
    limits = ("max_new_tokens=3,4", "num_choices=1,2", "bench.end=1", "name=limits")
    assert evaluate("-m", "method=vanilla", "timed=false", *limits).code == 0
    rows = [run.answers[0] for run in read_runs(tmp_path / "results/limits")]
    counts = [[sum(choice["new_tokens"]) for choice in row["choices"]] for row in rows]
    assert sorted(counts) == [[6], [6, 6], [8], [8, 8]], "in two turns"


def test_one_that_fails_leaves_the_others_alone_and_is_told_at_the_end(
    evaluate, tmp_path, monkeypatch
):
    def failing(questions, methods):
        if methods[0][0].settings["name"] == "pld" and questions[0].question_id == 11:
            raise error
        return real(questions, methods)

    error = torch.OutOfMemoryError("pld has had enough")
    real = runner.answer
    monkeypatch.setattr(runner, "answer", failing)
    sweep = ("-m", "method=vanilla,pld,recycling", "bench.end=3", "max_new_tokens=8", "name=f")
    outcome = evaluate(*sweep, "interleave=true")
    assert outcome.code == 2 and outcome.err.count("out of device memory") == 1
    done = {run.label: len(run.answers) for run in read_runs(tmp_path / "results/f")}
    assert done == {"vanilla": 3, "pld": 1, "recycling (cold)": 3}
    assert missing_jobs(tmp_path / "results/f").startswith("missing: 1 of ")
    error = KeyError("a defect of ours")
    with pytest.raises(KeyError, match="a defect of ours"):
        evaluate(*sweep, "interleave=true")


def test_what_takes_turns_is_of_one_model_bench_and_repeat():
    base = {"repeat": 0, "timed": True, "interleave": True, "start": "hot"}
    base |= {"model": {"name": "a"}, "bench": {"name": "b", "order": "file"}}
    jobs = [
        base | {"start": "saved", "method": "six"},
        base | {"repeat": 1, "method": "seven"},
        base | {"interleave": False, "method": "five"},
        base | {"method": "one"},
        base | {"method": "two", "bench": {"name": "b", "order": "shuffled"}},
        base | {"method": "three", "timed": False, "interleave": False},
        base | {"method": "four", "model": {"name": "c"}},
    ]
    groups = grouped([Job(config) for config in jobs])
    assert [[job.config["method"] for job in group] for group in groups] == [
        *(["five"], ["one", "two", "three"], ["four"], ["seven"], ["six"]),
    ]
