"""Repeats pooled, with their deviations and intervals, against values computed by hand; Table 1; what is written."""

import json
import math

import numpy as np
import pytest

from evaluation.statistics.experiment import Experiment
from evaluation.statistics.intervals import deviation, quotient_interval, speed_interval
from evaluation.statistics.notes import BATCHES, ONE_REPEAT, doubts, headlines, mixed
from evaluation.statistics.pools import mat_ratio, pools
from evaluation.statistics.rendering import page_view, write_tables
from evaluation.statistics.tables import AUDITED, depths_table, speedups
from tests.evaluation.made_runs import answer, in_terminal, made, on_paper, write


def eight(lengths, other_lengths, seconds, other_seconds):
    """Answers to eight questions, the odd ones by the first lengths in the first seconds."""
    kinds = ((lengths, seconds), (other_lengths, other_seconds))
    return [answer(i, "qa", [kinds[(i - 1) % 2]]) for i in range(1, 9)]


# Eight questions, two repeats. Vanilla: odd questions at 2 tokens/s, even ones at 4. The method: at 4 and then 2, at 8
# and then 6; in the second repeat it needs one step for an even question.
VANILLA = [made("vanilla", eight([1] * 4, [1] * 8, 2.0, 2.0), repeat=r) for r in (0, 1)]
METHOD = [
    made("pld", eight([3, 1], [[4, 4], [8]][r], r + 1.0, 8 / (8 - 2 * r)), repeat=r) for r in (0, 1)
]


def test_repeats_are_pooled_by_hand():
    """A ratio of sums or means, never the mean of the questions' ratios."""
    table = Experiment([*VANILLA, *METHOD]).table.set_index(["method", "category"])
    row = table.loc[("pld", "overall")]
    assert (row["repeats"], row["questions"], row["new_tokens"], row["steps"]) == (2, 8, 96, 28)
    assert row["mat"] == 96 / 28 and row["mat_std"] == pytest.approx(deviation([48 / 16, 48 / 12]))
    assert (row["mat_low"], row["mat_high"]) == quotient_interval(
        np.array([8.0, 16.0] * 4), np.array([4.0, 3.0] * 4)
    )
    assert row["tokens_per_second"] == pytest.approx((3 + 7) / 2)
    assert row["tokens_per_second_std"] == pytest.approx(deviation([6, 4]))
    # (questions, repeats)
    speeds, base = (
        np.array([[4.0, 2.0], [8.0, 6.0]] * 4),
        np.array([[2.0, 2.0], [4.0, 4.0]] * 4),
    )
    ends = row["tokens_per_second_low"], row["tokens_per_second_high"]
    assert ends == speed_interval(speeds, np.ones((8, 2))) and ends[0] < 4 and ends[1] > 6
    assert row["speedup_vanilla"] == pytest.approx(5 / 3)
    assert row["speedup_vanilla_std"] == pytest.approx(deviation([6 / 3, 4 / 3]))
    assert (row["speedup_vanilla_low"], row["speedup_vanilla_high"]) == speed_interval(speeds, base)
    assert math.isnan(row["speedup_hf"]), "no baseline, no speedup"
    assert table.loc[("vanilla", "overall"), "speedup_vanilla"] == 1.0


def test_a_speedup_and_its_interval_are_of_the_same_repeats():
    """The speedup had been of all repeats, 7.78 here, and its interval of those that both have."""
    third = made("pld", eight([3, 1], [8], 0.1, 0.1), repeat=2)  # vanilla has none
    # of one repeat in common all are taken
    for runs in (
        [*VANILLA, *METHOD, third],
        [VANILLA[0], *METHOD],
    ):
        row = Experiment(runs).table.set_index(["method", "category"]).loc[("pld", "overall")]
        assert row["speedup_vanilla"] == pytest.approx(5 / 3)
        assert row["speedup_vanilla_low"] < row["speedup_vanilla"] < row["speedup_vanilla_high"]
    twice = made("vanilla", eight([1] * 4, [1] * 8, 1.0, 1.0), repeat=1)
    cut = made("pld", METHOD[1].answers[:1], repeat=1, questions=8)  # one question has both
    row = (
        Experiment([VANILLA[0], twice, METHOD[0], cut])
        .table.set_index(["method", "category"])
        .loc[("pld", "overall")]
    )
    assert row["speedup_vanilla"] == pytest.approx((3 + 3 * 4 + 4 * 8) / (3 + 3 * 2 + 4 * 4))


def in_batches(
    label, *seconds, size=2, repeat=0, numbers=(1, 2, 3, 4), categories="qa rag qa qa", **more
):
    """Answers of 10, 100, 20 and 20 tokens to four questions, in these seconds, in batches."""
    tokens, names = dict(zip((1, 2, 3, 4), (10, 100, 20, 20), strict=True)), categories.split()
    rows = [
        answer(i, names[i - 1], [([1] * tokens[i], time)])
        for i, time in zip(numbers, seconds, strict=False)
    ]
    run = made(label, rows, repeat=repeat, questions=len(rows), **more)
    run.metadata["settings"]["batch"] = size
    return run


# hf gives each row an equal share of its batch's 22 and 4 s, the engine a share of the steps that the row was in.
HF_BATCH, VANILLA_BATCH = in_batches("hf", 11, 11, 2, 2), in_batches("vanilla", 1, 19, 2, 2)
ALONE = [in_batches("hf", 4, 40, 8, 8, size=1), in_batches("vanilla", 2, 20, 4, 4, size=1)]


def test_speeds_of_batches_are_of_all_tokens_and_all_time():
    """The mean of the questions' speeds was 1.17 of hf's where 150 tokens took 24 s for 26 s."""
    table = (
        Experiment([*ALONE, HF_BATCH, VANILLA_BATCH])
        .table.set_index(["method", "batch", "category"])
        .sort_index()
    )
    hf, ours = (table.loc[name, 2, "overall"] for name in ("hf", "vanilla"))
    assert hf["tokens_per_second"] == hf["tokens_per_second_total"] == pytest.approx(150 / 26)
    assert ours["tokens_per_second"] == pytest.approx(150 / 24) and ours[
        "speedup_hf"
    ] == pytest.approx(26 / 24)
    assert table.loc["vanilla", 1, "overall"]["speedup_hf"] == pytest.approx(2.0), "of its own size"
    by_subtask = table.loc["vanilla", 2].loc[["qa", "rag"], ["tokens_per_second", "speedup_hf"]]
    assert by_subtask.loc["qa"].tolist() == [10.0, 1.0] and by_subtask.loc["rag"].isna().all(), (
        "rag shares its batch"
    )
    again = [in_batches("hf", 22, 22, 4, 4, repeat=1), in_batches("vanilla", 1, 19, 8, 8, repeat=1)]
    row = (
        Experiment([HF_BATCH, VANILLA_BATCH, *again])
        .table.set_index(["method", "category"])
        .loc["vanilla", "overall"]
    )
    assert row["tokens_per_second"] == pytest.approx(300 / 60) and row[
        "speedup_hf"
    ] == pytest.approx(78 / 60)
    assert row["speedup_hf_std"] == pytest.approx(deviation([26 / 24, 52 / 36]))
    assert row["tokens_per_second_std"] == pytest.approx(deviation([150 / 24, 150 / 36]))


@pytest.mark.parametrize(
    ("hf", "speedup"),
    [
        (in_batches("hf", 11, 11, 2), 22 / 20),  # its last batch is another one
        (in_batches("hf", 11, 11, numbers=(1, 2)), 22 / 20),
        (in_batches("hf", 11, 2, 11, 2, numbers=(1, 3, 2, 4)), math.nan),
        (in_batches("hf", 11, 11, 2, 2, size=4), math.nan),
    ],
)
def test_batches_are_compared_whole(hf, speedup):
    table = Experiment([hf, VANILLA_BATCH]).table.set_index(["method", "category"])
    assert table.loc[("vanilla", "overall"), "speedup_hf"] == pytest.approx(speedup, nan_ok=True)
    assert table.loc[("vanilla", "overall"), "tokens_per_second"] == pytest.approx(150 / 24)
    one, other = (pool.speeds for pool in pools([ALONE[1], VANILLA_BATCH]))
    for cells, base in ((one, VANILLA_BATCH), (other, ALONE[1])):
        assert np.isnan([*speedups("hf", cells, pools([base])[0]).values()]).all(), (
            "of two sizes there is no ratio"
        )


def test_batches_find_the_baseline_of_their_own_order():
    """The baseline of the first order counted, as it has all questions, and none of the batches: no speedup."""
    orders = [(1, 2, 3, 4), (3, 1, 4, 2)]
    runs = [
        in_batches(label, *times, numbers=numbers, bench={"order": f"order-{place}"})
        for label, seconds in (("hf", 4), ("vanilla", 2), ("pld", 1))
        for place, numbers in enumerate(orders)
        for times in [[seconds * (1 + place)] * 4]
    ]
    table = Experiment(runs).table
    whole = table[table["category"] == "overall"].set_index(["method", "order"])
    assert (
        whole.loc["pld", ["speedup_hf", "speedup_vanilla"]].to_numpy().tolist() == [[4.0, 2.0]] * 2
    )


def test_an_answer_of_unknown_steps_is_in_no_pair():
    """Of a server that did not report all of them, the baseline's tokens and steps had counted alone: 1.0."""

    def served(speculation, *steps):
        method = {
            "drafter": "server",
            "engine": "vllm",
            "speculation": speculation,
            "model": "m",
            "version": "1",
        }
        more = {"accept_lengths": [], "engine_means": [{}], "ids_remade": [False]}
        more |= {"first_tokens": [4], "decode_time": [0.5]}
        rows = [
            answer(
                i,
                "qa",
                [([], 1.0)],
                **more | {"new_tokens": [10 * i * i], "decoding_steps": [taken]},
            )
            for i, taken in enumerate(steps, start=1)
        ]
        return made("vllm", rows, method=method)

    drafting, plain = pools([served("eagle", 5, None), served("none", 10, 10)])
    assert mat_ratio(drafting.cells, plain.cells)[0] == 2.0
    row = Experiment(drafting.runs).table.iloc[-1]
    assert (row["mat"], row["tokens_per_second_decode"]) == (2.0, (10 + 40 - 2 * 4) / (2 * 0.5))
    ends = [
        Experiment([served("eagle", *[5] * known, None)]).table["mat_low"].iloc[-1]
        for known in (7, 8)
    ]
    assert np.isfinite(ends).tolist() == [False, True], "of eight questions"


def test_what_is_not_judged_has_no_count_of_wrong_tokens():
    """Of answers without ids 0 tokens had been wrong."""

    def judged(*counts):
        audit = dict(zip(AUDITED, counts, strict=True))
        server = {"drafter": "server", "engine": "vllm"}
        row = answer(1, "qa", [([1], 1.0)], ids_remade=[True])
        return made("vllm", [row], method=server, summary={"audit": audit})

    for counts, column in (((0, 0, 0), False), ((3, 0, 0), True), ((0, 0, 1), True)):
        assert ("tokens_wrong" in Experiment([judged(*counts)]).table) is column


def test_intervals_of_batches_are_over_batches():
    """Sixteen questions in eight batches, or in four; in two repeats."""

    def run(size, repeat=0):
        rows = [answer(i, "qa", [([1] * (1 + i % 5), 1.0 + i % 3 + repeat)]) for i in range(16)]
        made_run = made("vanilla", rows, repeat=repeat)
        made_run.metadata["settings"]["batch"] = size
        return made_run

    tokens, seconds = (np.array([of(i) + of(i + 1) for i in range(0, 16, 2)], float)
                       for of in (lambda i: 1 + i % 5, lambda i: 1 + i % 3))  # fmt: skip
    ends = "tokens_per_second_low", "tokens_per_second_high"
    once, twice, four = (Experiment(runs).table[[*ends]].iloc[-1].tolist()
                         for runs in ([run(2)], [run(2), run(2, 1)], [run(4)]))  # fmt: skip
    assert once == pytest.approx(quotient_interval(tokens, seconds)) and np.isnan(four).all()
    columns = np.stack([tokens, tokens], axis=1), np.stack([seconds, seconds + 2], axis=1)
    assert twice == pytest.approx(speed_interval(*columns, alike=False))


def test_tables_say_that_speeds_are_of_batches():
    runs = [*ALONE, HF_BATCH, VANILLA_BATCH]
    (line,) = headlines(Experiment(runs).table)
    assert line.endswith(
        "vanilla, batch=2 is fastest, 6 tokens/s in total at batch 2 (1.08 × hf of the same batch)."
    )
    # 9 tokens/s as a mean, 2.4 in total
    slow = [
        *ALONE,
        in_batches("hf", 30, 30, 9, 9),
        in_batches("vanilla", 1, 60, 1, 1),
    ]
    assert (
        "vanilla, batch=1 is fastest, 5 tokens/s in total at batch 1 (2.00 ×"
        in headlines(Experiment(slow).table)[0]
    )
    # 8.1 tokens/s as a mean, 3.1 in total
    uneven = [
        in_batches("vanilla", 0.5, 40, 4, 4, size=1),
        VANILLA_BATCH,
    ]
    assert headlines(Experiment(uneven).table)[0].endswith(
        "batch=2 is fastest, 6 tokens/s in total at batch 2."
    )
    for text in (in_terminal(runs), on_paper(runs)):
        assert BATCHES in text and "tokens/s, total" in text
    for text in (in_terminal(ALONE), on_paper(ALONE)):
        assert BATCHES not in text and "total" not in text
    hidden = [
        ("tokens_per_second_total" in page_view(Experiment(of).table).blocks[0].extra)
        for of in (runs, ALONE)
    ]
    assert hidden == [False, True]


def test_pairs_are_of_the_same_question_and_repeat():
    """Of incomplete repeats the break-even MAT had been 1.14: vanilla's slow answer, which pld lacks, had counted."""

    def run(label, repeat, *timed):
        rows = [answer(i, "qa", [(lengths, 9.0)], decode_time=[time]) for i, lengths, time in timed]
        return made(label, rows, repeat=repeat, questions=2)

    first, second = (1, [1] * 5, 4.0), (2, [1] * 3, 2.0)
    plain = [
        run("vanilla", 0, first, second),
        run("vanilla", 1, (1, [1] * 5, 12.0), (2, [3], 20.0)),
    ]
    drafts = [
        run("pld", 0, (1, [2, 2, 1], 4.0), (2, [1, 2], 2.0)),
        run("pld", 1, (1, [3, 1, 1], 12.0)),
    ]
    own, base = pools([*drafts, *plain])
    table = Experiment([*drafts, *plain]).table.set_index(["method", "category"])["break_even_mat"]
    assert table["pld", "overall"] == pytest.approx((18 / 5) / (18 / 10))
    assert mat_ratio(own.cells, base.cells)[0] == pytest.approx((5 + 3) / (3 + 2))
    # without a common repeat: means over repeats
    (once,) = pools([run("vanilla", 2, first, second)])
    assert mat_ratio(base.cells, once.cells)[0] == pytest.approx((5 + 3) / (5 + 2))


def test_break_even_mat_by_hand():
    """Steps behind the first: two in 3 s, plain ones three in 3 s; only of the question that both have."""

    def timed(i, lengths, seconds):
        return answer(i, "qa", [(lengths, 1.0 + seconds)], decode_time=[seconds])

    plain = made("vanilla", [timed(1, [1, 1, 1, 1], 3.0), timed(2, [1, 1], 9.0)])
    run = made("pld", [timed(1, [2, 1, 1], 3.0), timed(3, [2, 1], 90.0)])
    untimed = made("suffix", [answer(1, "qa", [([2, 2], 0.0)])])
    table = Experiment([plain, run, untimed]).table.set_index(["method", "category"])[
        "break_even_mat"
    ]
    assert (
        table["pld", "overall"] == pytest.approx((3.0 / 2) / (3.0 / 3))
        and table["vanilla", "overall"] == 1
    )
    assert math.isnan(table["suffix", "overall"])


def test_a_speedup_that_may_be_none_is_marked_and_explained():
    slow = made("pld", eight([3, 1], [4, 4], 8.0, 4 / 3))  # 0.5 and 6 tokens/s
    runs = [VANILLA[0], slow]
    for text in (in_terminal(runs), on_paper(runs)):
        assert "1.08~" in text and "includes 1" in text and "1.00~" not in text
    by = {"drafter": "server", "engine": "vllm", "version": "1", "model": "m"}
    served = [
        made(
            label,
            [
                row | {"choices": [c | {"ids_remade": [False]} for c in row["choices"]]}
                for row in run.answers
            ],
            method=by,
        )
        for label, run in (("vllm", VANILLA[0]), ("vllm (eagle)", slow))
    ]
    assert "1.08~" in in_terminal(served) and "includes 1" in in_terminal(served)
    calm = [*VANILLA, METHOD[0], made("pld", METHOD[0].answers, repeat=1)]  # twice the same
    assert "~" not in in_terminal(calm) and "| 3.00 [2." in on_paper(calm)


def test_one_repeat_says_that_its_intervals_leave_out_the_drift():
    unpaired = [VANILLA[0], *METHOD]  # the baseline has no second repeat to be paired with
    for runs, once in (
        ([VANILLA[0], METHOD[0]], True),
        (unpaired, True),
        ([*VANILLA, *METHOD], False),
    ):
        table = Experiment(runs).table
        for text in (in_terminal(runs), on_paper(runs), str(page_view(table).footnotes)):
            assert (ONE_REPEAT in text) is once


def test_what_a_repeat_lacks_does_not_become_a_guess():
    half = made("pld", METHOD[1].answers[:1], repeat=1, questions=8)
    table = Experiment([*VANILLA, METHOD[0], half]).table
    row = table[(table["method"] == "pld") & (table["category"] == "overall")].iloc[0]
    assert (
        row["tokens_per_second"] == pytest.approx((3 + 8 + 3 * (4 + 8)) / 8) and not row["complete"]
    )
    assert "incomplete: pld, repeat 1: 1 of 8" in in_terminal([half])


def test_other_limits_and_types_are_not_compared_and_not_mixed():
    rows = [answer(1, "qa", [([2], 1.0)])]
    other = made("vanilla", rows)
    other.metadata["settings"]["max_new_tokens"] = 32
    runs, twice = [made("pld", rows), other], made("vanilla", rows)
    twice.metadata["settings"]["num_choices"] = 2
    assert Experiment([*runs, twice]).table["speedup_vanilla"].isna().sum() == 2
    table = Experiment(runs).table
    assert table["speedup_vanilla"].isna().sum() == 2  # pld's two rows; vanilla's own stay 1
    text = in_terminal(runs)
    assert "max_new_tokens 16, overall" in text and "max_new_tokens 32, overall" in text


def test_runs_next_to_each_other_under_other_circumstances_are_named():
    """A sweep stopped and taken up with other versions pools its repeats, and says so below every table."""
    rows = [answer(1, "qa", [([1, 1], 1.0)])]
    one, two = (
        {"device": "a machine", "versions": {"torch": v}, "linear": "onednn"}
        for v in ("2.13.0", "2.14.0")
    )
    runs = [made("vanilla", rows, repeat=i, circumstances=c) for i, c in enumerate((one, one, two))]
    (line,) = mixed(runs)
    assert "versions.torch is 2.13.0" in line and "2.14.0 for vanilla, repeat 2" in line
    assert line in on_paper(runs) and mixed(runs[:2]) == []


def test_each_repeat_and_variant_that_began_among_others_is_named():
    rows = [answer(1, "qa", [([1], 1.0)])]
    runs = [
        made("pld", rows, repeat=i, cores_busy_elsewhere=cores)
        for i, cores in enumerate([1.5, 0.0, 2.0])
    ]
    runs += [
        made("recycling (hot)", rows, method={"k": k}, cores_busy_elsewhere=c)
        for k, c in ((4, 1.0), (8, 0.1))
    ]
    runs += [
        made(label, rows, cores_busy_elsewhere=c)
        for label, c in (("unknown", None), ("untimed", 2.0))
    ]
    runs[-1].metadata["settings"]["timed"] = False
    (line,) = doubts(pools(runs))
    assert "pld, repeat 0: 1.5; pld, repeat 2: 2.0; recycling (hot), k=4: 1.0)" in line
    assert line in in_terminal(runs) and line in on_paper(runs), "and not in the terminal alone"
    assert doubts(pools([made("calm", rows, cores_busy_elsewhere=0.4)])) == []


def test_all_tables_are_written_and_read_again(tmp_path):
    steps = {
        "step_nodes": [[4, 4, 1]],
        "step_paths": [[[0, 0], [], []]],
        "output_ids": [[1, 2, 3, 4, 5]],
    }
    method = {"k": 8, "dtype": "int64", "tree": "x", "tree_nodes": 3}
    answers = [answer(1, "qa", [([3, 1, 1], 1.0)], **steps)]
    folder = write(
        made("recycling (hot)", answers, method=method, draft_tree=[[0], [1], [0, 0]]), tmp_path
    )
    (folder / "summary.json").write_text(json.dumps({"state_bytes": 6400}))
    (tmp_path / "sweep.json").write_text('{"jobs": [["a=1"]], "command": "again"}')
    experiment = Experiment.read(tmp_path)
    sampled = [made(label, answers) for label in ("hf", "pld")]
    for run in sampled:
        run.metadata["settings"]["sampling"] = {"temperature": 1.0}
    write_tables(Experiment([*experiment.runs, *sampled], tmp_path), tmp_path / "tables")
    assert not (tmp_path / "tables/table1.csv").exists(), "which is of greedy runs"
    write_tables(experiment, tmp_path / "tables")
    assert "to complete the sweep: again" in (tmp_path / "tables/main.md").read_text()
    depths = depths_table(experiment.pools)
    assert depths["joint_acceptance"].tolist() == [0.5, 0.5] and depths[
        "conditional_acceptance"
    ].tolist() == [0.5, 1.0]
    assert experiment.table["state_bytes"].tolist() == [6400, 6400]
