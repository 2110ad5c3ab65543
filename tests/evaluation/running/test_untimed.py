"""timed=false: the same answers by the same steps in shared forwards, without times."""

import re

from evaluation.records.runs import read_runs
from evaluation.records.sweeps import missing_jobs
from evaluation.running import scheduling
from tests.evaluation.running.test_scheduling import records, states

METHODS = "method=hf,vanilla,recycling"  # test_shared_text.py has every method
SWEEP = ("-m", METHODS, "start=cold,hot", "bench.end=2", "max_new_tokens=10")


def unmarked(by_folder: dict) -> list:
    """Records without the folders' names, which hold a hash of the settings."""
    return sorted((name.rpartition("-")[0], *value) for (name, _), value in by_folder.items())


def test_untimed_runs_hold_the_same_answers_steps_and_states(evaluate, tmp_path, monkeypatch):
    assert evaluate(*SWEEP, "name=timed").code == 0
    monkeypatch.setattr(scheduling, "LOG_SECONDS", 0.0)
    outcome = evaluate(*SWEEP, "name=untimed", "timed=false", "repeats=3")
    assert outcome.code == 0, outcome.err
    assert re.findall(r"(\d) of 8 answers, .* left$", outcome.err, flags=re.M) == [
        "1",
        "4",
        "5",
        "8",
    ], "all but hf's are shared"
    timed, untimed = tmp_path / "results/timed", tmp_path / "results/untimed"
    assert unmarked(records(timed)) == unmarked(records(untimed)), (
        "one of each: three would be three times the same"
    )
    assert not missing_jobs(untimed), "hf and vanilla are of two jobs each"
    one, other = (
        {name.rpartition("-")[0]: state for name, state in states(folder).items()}
        for folder in (timed, untimed)
    )
    assert one == other and len(one) == 1
    for run in read_runs(untimed):
        for row in run.answers:
            assert row["peak_memory"] is None
            for choice in row["choices"]:
                assert (
                    choice["wall_time"] == [0.0] * len(choice["turns"])
                    and choice["step_us"] is None
                )
                assert all(
                    set(choice[key]) == {None}
                    for key in ("prefill_time", "decode_time", "setup_time")
                )
    table = (untimed / "tables/main.md").read_text(encoding="utf-8")
    assert "| MAT |" in table and "tokens/s" not in table and "not timed" in table
    for figure in (untimed / "figures").glob("*.svg"):
        assert "tokens/s" not in figure.read_text(encoding="utf-8"), figure.name


def test_runs_at_other_questions_answer_by_themselves(evaluate, tmp_path):
    sweep = (
        "-m",
        "method=vanilla,recycling",
        "start=hot",
        "bench.end=3",
        "max_new_tokens=8",
        "timed=false",
    )
    outcome = evaluate(*sweep, "bench.order=file,shuffled", "name=orders")
    assert outcome.code == 0, outcome.err
    runs = read_runs(tmp_path / "results/orders")
    assert len(runs) == 3, "vanilla once: the order counts only where state is kept"
    kept = {run.settings["bench"]["order"]: run.answers for run in runs if run.label != "vanilla"}
    ids = {order: [row["question_id"] for row in rows] for order, rows in kept.items()}
    assert ids == {"file": [10, 11, 12], "shuffled": [10, 12, 11]}
    outputs = [
        {row["question_id"]: row["choices"][0]["output_ids"] for row in run.answers} for run in runs
    ]
    assert outputs == [outputs[0]] * 3
    limits = ("max_new_tokens=3,4", "num_choices=1,2", "bench.end=1", "name=limits")
    assert evaluate("-m", "method=vanilla", "timed=false", *limits).code == 0
    counts = [
        [sum(c["new_tokens"]) for c in run.answers[0]["choices"]]
        for run in read_runs(tmp_path / "results/limits")
    ]
    assert sorted(counts) == [[6], [6, 6], [8], [8, 8]], "in two turns"
