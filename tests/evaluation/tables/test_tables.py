"""Repeats and batches pooled, against values computed by hand; what is written and said below the tables."""

import json
import math

import numpy as np
import pytest

from evaluation.report import write_tables
from evaluation.statistics.intervals import deviation, quotient_interval, speed_interval
from evaluation.statistics.pools import mat_ratio, pools
from evaluation.tables.experiment import Experiment
from evaluation.tables.notes import ONE_REPEAT, doubts, mixed
from evaluation.tables.rendering import cell
from tests.evaluation.made_runs import answer, in_terminal, made, on_paper, overall, write


def eight(lengths, other_lengths, seconds, other_seconds):
    """Answers to eight questions, the odd ones by the first lengths in the first seconds."""
    pair = [(lengths, seconds), (other_lengths, other_seconds)]
    return [answer(i, "qa", [turn]) for i, turn in enumerate(pair * 4)]


# Eight questions, two repeats. Vanilla: odd questions at 2 tokens/s, even ones at 4. The method: at 4 and then 2, at 8
# and then 6; in the second repeat it needs one step for an even question.
VANILLA = [made("vanilla", eight([1] * 4, [1] * 8, 2.0, 2.0), repeat=r) for r in (0, 1)]
METHOD = [
    made("pld", eight([3, 1], [4, 4], 1.0, 1.0), repeat=0),
    made("pld", eight([3, 1], [8], 2.0, 8 / 6), repeat=1),
]


def test_repeats_are_pooled_by_hand():
    """A ratio of sums or means, never the mean of the questions' ratios."""
    table = overall([*VANILLA, *METHOD])
    row = table.loc["pld"]
    assert row[["repeats", "questions", "new_tokens", "steps"]].tolist() == [2, 8, 96, 28]
    assert row["mat"] == 96 / 28
    assert row["mat_std"] == pytest.approx(deviation([48 / 16, 48 / 12]))
    ends = quotient_interval(np.array([8.0, 16.0] * 4), np.array([4.0, 3.0] * 4))
    assert (row["mat_low"], row["mat_high"]) == ends

    speeds = np.array([[4.0, 2.0], [8.0, 6.0]] * 4)  # (questions, repeats)
    base = np.array([[2.0, 2.0], [4.0, 4.0]] * 4)
    assert row["tokens_per_second"] == pytest.approx((3 + 7) / 2)
    assert row["tokens_per_second_std"] == pytest.approx(deviation([6, 4]))
    ends = speed_interval(speeds, np.ones((8, 2)))
    assert (row["tokens_per_second_low"], row["tokens_per_second_high"]) == ends
    assert row["speedup_vanilla"] == pytest.approx(5 / 3)
    assert row["speedup_vanilla_std"] == pytest.approx(deviation([6 / 3, 4 / 3]))
    ends = speed_interval(speeds, base)
    assert (row["speedup_vanilla_low"], row["speedup_vanilla_high"]) == ends
    assert math.isnan(row["speedup_hf"]), "no baseline, no speedup"
    assert table.loc["vanilla", "speedup_vanilla"] == 1.0


def in_batches(label, *seconds, size=2, numbers=(1, 2, 3, 4), **more):
    """Answers of 10, 100, 20 and 20 tokens to four questions, in these seconds, in batches."""
    rows = []
    for number, time in zip(numbers, seconds, strict=False):
        tokens = [1] * (10, 100, 20, 20)[number - 1]
        rows.append(answer(number, "rag" if number == 2 else "qa", [(tokens, time)]))
    run = made(label, rows, **more)
    run.metadata["settings"]["batch"] = size
    return run


# hf gives each row an equal share of its batch's 22 and 4 s, the engine a share of the steps that the row was in.
HF_BATCH = in_batches("hf", 11, 11, 2, 2)
VANILLA_BATCH = in_batches("vanilla", 1, 19, 2, 2)
ALONE = [in_batches("hf", 4, 40, 8, 8, size=1), in_batches("vanilla", 2, 20, 4, 4, size=1)]


def test_speeds_of_batches_are_of_all_tokens_and_all_time():
    """The mean of the questions' speeds was 1.17 of hf's where 150 tokens took 24 s for 26 s."""
    table = Experiment([*ALONE, HF_BATCH, VANILLA_BATCH]).table
    table = table.set_index(["method", "batch", "category"]).sort_index()
    hf = table.loc["hf", 2, "overall"]
    ours = table.loc["vanilla", 2, "overall"]
    assert hf["tokens_per_second"] == hf["tokens_per_second_total"] == pytest.approx(150 / 26)
    assert ours["tokens_per_second"] == pytest.approx(150 / 24)
    assert ours["speedup_hf"] == pytest.approx(26 / 24)
    assert table.loc["vanilla", 1, "overall"]["speedup_hf"] == pytest.approx(2.0), "of its own size"
    speeds = table.loc["vanilla", 2][["tokens_per_second", "speedup_hf"]]
    assert speeds.loc["qa"].tolist() == [10.0, 1.0]
    assert speeds.loc["rag"].isna().all(), "it shares its batch"


@pytest.mark.parametrize(
    ("hf", "speedup"),
    [
        (in_batches("hf", 11, 11, 2), 22 / 20),  # its last batch is another one
        (in_batches("hf", 11, 2, 11, 2, numbers=(1, 3, 2, 4)), math.nan),
        (in_batches("hf", 11, 11, 2, 2, size=4), math.nan),
    ],
)
def test_batches_are_compared_whole(hf, speedup):
    row = overall([hf, VANILLA_BATCH]).loc["vanilla"]
    assert row["speedup_hf"] == pytest.approx(speedup, nan_ok=True)
    assert row["tokens_per_second"] == pytest.approx(150 / 24)


def test_batches_find_the_baseline_of_their_own_order():
    """The baseline of the first order counted, as it has all questions, and none of the batches: no speedup."""
    runs = []
    for order, numbers in enumerate([(1, 2, 3, 4), (3, 1, 4, 2)]):
        for label, seconds in (("hf", 4), ("vanilla", 2), ("pld", 1)):
            times = [seconds * (1 + order)] * 4
            bench = {"order": f"order-{order}"}
            runs.append(in_batches(label, *times, numbers=numbers, bench=bench))
    assert overall(runs).loc["pld", "speedup_hf"].tolist() == [4.0, 4.0]


def served(speculation, *steps):
    """A server's run, one question for each number of steps, which may be unknown."""
    method = {"drafter": "server", "engine": "vllm", "speculation": speculation}
    method |= {"model": "m", "version": "1"}
    rows = []
    for i, taken in enumerate(steps, start=1):
        more = {"accept_lengths": [], "engine_means": [{}]}
        more |= {"first_tokens": [4], "decode_time": [0.5]}
        more |= {"new_tokens": [10 * i * i], "decoding_steps": [taken]}
        rows.append(answer(i, "qa", [([], 1.0)], **more))
    return made("vllm", rows, method=method)


def test_an_answer_of_unknown_steps_is_in_no_pair():
    """Of a server that did not report all of them, the baseline's tokens and steps had counted alone: 1.0."""
    drafting, plain = pools([served("eagle", 5, None), served("none", 10, 10)])
    assert mat_ratio(drafting.cells, plain.cells)[0] == 2.0
    row = overall(drafting.runs).loc["vllm"]
    assert (row["mat"], row["tokens_per_second_decode"]) == (2.0, (10 + 40 - 2 * 4) / (2 * 0.5))
    row = overall([served("eagle", *[5] * 7, None)]).loc["vllm"]
    assert math.isnan(row["mat_low"]), "seven of eight questions"


def test_break_even_mat_by_hand():
    """Steps behind the first: two in 3 s, plain ones three in 3 s; only of the question that both have."""

    def timed(i, lengths, seconds):
        return answer(i, "qa", [(lengths, 1.0 + seconds)], decode_time=[seconds])

    plain = made("vanilla", [timed(1, [1, 1, 1, 1], 3.0), timed(2, [1, 1], 9.0)])
    run = made("pld", [timed(1, [2, 1, 1], 3.0), timed(3, [2, 1], 90.0)])
    untimed = made("suffix", [answer(1, "qa", [([2, 2], 0.0)])])
    values = overall([plain, run, untimed])["break_even_mat"]
    assert values.loc[["pld", "vanilla"]].tolist() == [pytest.approx(1.5), 1.0]
    assert math.isnan(values["suffix"])


def test_marks_and_notes_of_speeds():
    slow = made("pld", eight([3, 1], [4, 4], 8.0, 4 / 3))  # 0.5 and 6 tokens/s
    for show in (in_terminal, on_paper):
        text = show([VANILLA[0], slow])
        assert "1.08~" in text and "includes 1" in text and "1.00~" not in text
        assert ONE_REPEAT in text and ONE_REPEAT not in show([*VANILLA, *METHOD])
    calm = [*VANILLA, METHOD[0], made("pld", METHOD[0].answers, repeat=1)]  # twice the same
    assert "~" not in in_terminal(calm) and "| 3.00 [2." in on_paper(calm)
    half = made("pld", METHOD[1].answers[:1], repeat=1, questions=8)
    assert "incomplete: pld, repeat 1: 1 of 8" in in_terminal([half])


@pytest.mark.parametrize(
    ("low", "high", "mark"),
    [
        (0.9, 1.1, "~"),
        (1.0, 1.2, "~"),
        (0.8, 1.0, "~"),
        (1.001, 1.2, ""),
        (0.5, 0.999, ""),
        (1.0, 1.0, ""),  # the baseline itself
        (math.nan, math.nan, ""),
    ],
)
def test_a_speedup_is_marked_exactly_if_its_interval_spans_one(low, high, mark):
    for name, marked in (("speedup_hf", mark), ("speedup_vanilla", mark), ("mat", "")):
        row = {name: 1.0, f"{name}_low": low, f"{name}_high": high}
        assert cell(row, name).mark == cell(row, name, with_interval=False).mark == marked


def test_other_limits_and_answers_per_question_are_not_compared():
    rows = [answer(1, "qa", [([2], 1.0)])]
    runs = [made("pld", rows), made("vanilla", rows), made("vanilla", rows)]
    runs[1].metadata["settings"]["max_new_tokens"] = 32
    runs[2].metadata["settings"]["num_choices"] = 2
    assert math.isnan(overall(runs).loc["pld", "speedup_vanilla"])
    text = in_terminal(runs)
    assert "max_new_tokens 16, overall" in text and "max_new_tokens 32, overall" in text


def test_runs_under_other_circumstances_and_among_other_processes_are_named():
    """A sweep stopped and taken up with other versions pools its repeats, and says so below every table."""
    rows = [answer(1, "qa", [([1, 1], 1.0)])]
    runs = []
    for repeat, (version, cores) in enumerate([("2.13.0", 1.5), ("2.13.0", 0.0), ("2.14.0", None)]):
        circumstances = {"versions": {"torch": version}, "linear": "onednn"}
        more = {"circumstances": circumstances, "cores_busy_elsewhere": cores}
        runs.append(made("vanilla", rows, repeat=repeat, **more))
    (line,) = mixed(runs)
    assert "versions.torch is 2.13.0" in line and "2.14.0 for vanilla, repeat 2" in line
    (doubt,) = doubts(pools(runs))
    assert "(vanilla, repeat 0: 1.5)" in doubt
    assert line in on_paper(runs) and doubt in on_paper(runs)
    assert mixed(runs[:2]) == doubts(pools(runs[1:])) == []


def test_all_tables_are_written_and_read_again(tmp_path):
    steps = {"step_nodes": [[4, 4, 1]], "step_paths": [[[0, 0], [], []]]}
    answers = [answer(1, "qa", [([3, 1, 1], 1.0)], output_ids=[[1, 2, 3, 4, 5]], **steps)]
    method = {"k": 8, "tree": "x", "tree_nodes": 3}
    run = made("recycling (hot)", answers, method=method, draft_tree=[[0], [1], [0, 0]])
    folder = write(run, tmp_path)
    (folder / "summary.json").write_text(json.dumps({"state_bytes": 6400}))
    (tmp_path / "sweep.json").write_text('{"jobs": [["a=1"]], "command": "again"}')
    experiment = Experiment.read(tmp_path)
    assert experiment.table["state_bytes"].tolist() == [6400, 6400]

    tables = tmp_path / "tables"
    write_tables(experiment, tables)
    assert "to complete the sweep: again" in (tables / "main.md").read_text()
    depths = (tables / "acceptance_by_depth.csv").read_text().splitlines()
    assert [line.rsplit(",", 2)[1:] for line in depths[1:]] == [["0.5", "0.5"], ["0.5", "1.0"]]

    for temperature, written in ((1.0, False), (0.0, True)):
        hf = made("hf", answers, bench={"name": "spec_bench"})
        hf.metadata["settings"]["sampling"] = {"temperature": temperature}
        write_tables(Experiment([*experiment.runs, hf], tmp_path), tables)
        assert (tables / "table1.csv").exists() is written, "of greedy runs"
