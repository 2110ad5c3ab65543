"""Every figure against a value computed by hand, and against Spec-Bench's own arithmetic."""

import math

import pytest

from evaluation.records.rows import MT_BENCH, between, check_rows, novel_tokens, subtask
from evaluation.records.runs import read_foreign, read_runs
from evaluation.statistics.metrics import (
    by_subtask,
    counts_between,
    lengths_by_turn,
    loop_start,
    measure,
    part_ms,
)
from model.errors import UserError
from tests.evaluation.made_runs import answer, made, write

ROWS = [
    # 10 tokens in 5 s, 5 steps
    answer(1, "writing", [([3, 1], 2.0), ([2, 2, 2], 3.0)], decode_time=[1.5, 2.0]),
    answer(2, "qa", [([1, 1, 1, 3], 0.5)], decode_time=[0.25]),  # 6 tokens in 0.5 s, 4 steps
]


def test_by_hand():
    figures = measure(ROWS)
    counts = [figures[name] for name in ("questions", "turns", "steps", "new_tokens")]
    assert counts == [2, 3, 9, 16]
    assert figures["mat"] == 16 / 9
    assert figures["mat_macro"] == (10 / 5 + 6 / 4) / 2
    assert figures["tokens_per_second"] == (10 / 5 + 6 / 0.5) / 2
    assert figures["tokens_per_second_total"] == 16 / 5.5
    # all but what each turn's first step gave
    assert figures["tokens_per_second_decode"] == (1 + 4 + 5) / 3.75


def test_rows_of_another_schema_are_refused(tmp_path):
    """By name: their accepted lengths may mean something else."""
    row = answer(1, "qa", [([1, 2, 1], 1.0)], step_nodes=[[1, 4, 0]], step_paths=[[[], [0], []]])
    check_rows(
        [row, {**answer(1, "qa", [([1], 1.0)]), "schema": None}],
        "other people's rows have no step records",
    )
    del row["schema"]
    with pytest.raises(UserError, match="here: recorded by another version"):
        check_rows([row], "here")
    folder = write(made("recycling (hot)", [row]), tmp_path)
    with pytest.raises(UserError, match="no runs here"):
        read_runs(tmp_path)
    with pytest.raises(UserError, match="recorded by another version"):
        read_foreign(str(folder / "answers.jsonl"))


def test_what_the_records_do_not_hold_is_nan_and_not_a_guess():
    """A question that took no time, as of a prompt without room for an answer, counts in no speed."""
    figures = measure([answer(1, "qa", [([2, 3], 1.0)]), answer(2, "qa", [([], 0.0)])])
    assert figures["tokens_per_second"] == 5.0 and figures["questions"] == 2
    choice = {"accept_lengths": [1, 2, 3], "decoding_steps": [2, 1]}
    assert lengths_by_turn(choice) == [[1, 2], [3]]
    assert lengths_by_turn(choice | {"decoding_steps": [2, 2]}) == lengths_by_turn({}) == [], (
        "whose step is whose?"
    )
    bare = answer(1, "qa", [([1, 1], 1.0)])
    del bare["choices"][0]["accept_lengths"]
    figures = measure([bare])
    assert math.isnan(figures["mat"]) and math.isnan(figures["tokens_per_second_decode"])
    assert figures["tokens_per_second"] == 2.0


def test_the_eight_labels_are_one_row_and_others_keep_their_name():
    assert {subtask(label) for label in MT_BENCH} == {"mt_bench"} and len(MT_BENCH) == 8
    groups = by_subtask(
        [answer(i, c, [([1], 1.0)]) for i, c in enumerate(["zoo", "math", "qa", "coding", "code"])]
    )
    counts = [("mt_bench", 2), ("qa", 1), ("code", 1), ("zoo", 1), ("overall", 5)]
    assert [(name, len(rows)) for name, rows in groups.items()] == counts


def test_times_and_memory_by_hand():
    # two turns: prefill and first step 0.2 and 0.4 s, the other 4 and 10 steps 1 and 2 s
    times = {"decode_time": [1.0, 2.0], "prefill_time": [0.2, 0.4], "prompt_time": [0.01, 0.03]}
    timed = answer(1, "qa", [([3, 1, 1, 1, 1], 1.2), ([1] * 11, 2.4)], **times)
    timed["peak_memory"] = 3 * 2**20
    # the second turn has no room for an answer and counts in no mean
    times = {"decode_time": [0.0] * 2, "prefill_time": [0.3, 0.0], "prompt_time": [0.02, 0.5]}
    other = answer(2, "qa", [([1], 0.1), ([], 0.0)], **times)
    other["peak_memory"] = 2**20
    figures = measure([timed, other])
    assert figures["prefill_ms"] == pytest.approx(300)
    assert figures["decode_ms"] == pytest.approx(1000)
    assert figures["time_to_first_token_ms"] == pytest.approx(320)
    assert figures["step_ms"] == pytest.approx(1e3 * 3.0 / (4 + 10))
    assert figures["tokens_per_second_decode"] == pytest.approx((4 + 10) / 3.0)
    assert figures["peak_memory_mib"] == 3.0

    del other["choices"][0]["prefill_time"], other["peak_memory"]
    lacking = measure([timed, other])
    for name in ("prefill_ms", "time_to_first_token_ms", "peak_memory_mib"):
        assert math.isnan(lacking[name])
    assert lacking["step_ms"] == figures["step_ms"]


def test_a_batchs_speed_is_of_all_its_tokens_and_mat_is_of_known_steps():
    rows = [answer(i, "qa", [([2] * n, 1.0)], step_batch=[[2] * n]) for i, n in enumerate((1, 3))]
    assert measure(rows)["tokens_per_second"] == 8 / 2
    bare = answer(3, "qa", [([9] * 9, 3.0)])
    del bare["choices"][0]["accept_lengths"]
    figures = measure([*ROWS, bare])
    assert (figures["mat"], figures["new_tokens"]) == (16 / 9, 16 + 81)
    slow = answer(4, "qa", [([1], 4.0)])
    assert measure([ROWS[1], slow])["tokens_per_second"] == (6 / 0.5 + 1 / 4) / 2


def test_rows_a_forward_by_hand():
    """A batch of two, whose second answer ends after its second step, and one that recorded no steps."""
    first = answer(1, "qa", [([1, 2, 1], 1.0)], step_nodes=[[1, 5, 9]], step_batch=[[1, 2, 1]])
    second = answer(2, "qa", [([1, 1], 1.0)], step_nodes=[[1, 3]], step_batch=[[1, 2]])
    assert measure([first, second])["rows_per_forward"] == pytest.approx((1 + 1 + (5 + 3) + 9) / 4)
    alone = answer(3, "qa", [([1, 2], 1.0), ([3], 1.0)], step_nodes=[[1, 5], [9]])
    assert measure([alone])["rows_per_forward"] == 5
    assert math.isnan(measure([alone, answer(4, "qa", [([1], 1.0)])])["rows_per_forward"])


def latencies(name, *rows):
    figures = measure(rows)
    return [figures[f"{name}_ms_p{percent}"] for percent in (50, 95, 99)]


def test_latencies_by_hand():
    """Percentiles linear between neighbours; a step is an interval, however many tokens it adds."""
    times = {"prefill_time": [0.2, 0.4], "prompt_time": [0.0, 0.1]}
    steps = [[200_000, 10_000, 30_000], [400_000, 20_000]]  # a turn's first is its prefill
    row = answer(1, "qa", [([3, 5, 1], 0.24), ([1, 5], 0.42)], step_us=steps, **times)
    first = latencies("time_to_first_token", row)
    assert first == pytest.approx([350, 200 + 0.95 * 300, 200 + 0.99 * 300])
    later = latencies("inter_token_latency", row)
    assert later == pytest.approx([20, 20 + 0.9 * 10, 20 + 0.98 * 10]), "of 10, 20 and 30"

    older = answer(2, "qa", [([1], 0.1)], prefill_time=[0.3], prompt_time=[0.0])
    assert math.isnan(latencies("inter_token_latency", row, older)[0])
    assert latencies("time_to_first_token", row, older)[0] == pytest.approx(300)
    # of a server's concurrent requests, each waits for its own; a turn without room is left out
    waited = {"first_tokens": [1, None], "first_token_time": [0.3, None], "step_batch": [[], []]}
    times = {"prefill_time": [0.1, 0.0], "prompt_time": [0.1, 0.0]}
    full = answer(1, "qa", [([1], 0.1), ([], 0.0)], **times, **waited)
    assert latencies("time_to_first_token", full)[0] == pytest.approx(400)
    assert math.isnan(latencies("time_to_first_token", answer(1, "qa", [([1], 0.1)]))[0])


def test_step_times_are_whole_microseconds_that_add_up():
    ends = [0.1000004, 0.1000014, 0.1000024, 0.25]
    assert (
        between(ends) == [100_000, 1, 1, 149_998]
        and sum(between(ends)) == 250_000
        and between([]) == []
    )


def test_novel_tokens_by_hand():
    prompt = [1, 2, 3, 4, 5]
    answer = [1, 2, 3, 4, 9, 1, 2, 3, 4]  # 1 2 3 4 occurs in the prompt, then in the answer
    assert novel_tokens(prompt, answer) == 7
    assert novel_tokens([], answer) == 5, "three tokens end no four"
    assert novel_tokens(prompt, []) == 0


def test_steps_of_turns_where_much_or_little_is_new():
    row = answer(1, "qa", [([4, 1], 1.0), ([1, 1, 2], 1.0)], novel_tokens=[1, 3])
    assert counts_between(row, novel=(0, 0.75)) == (5, 2)
    assert counts_between(row, novel=(0.75, 1)) == (4, 3), "the second turn's share"
    assert counts_between(row) == (9, 5)


def test_steps_by_position_and_before_a_loop_by_hand():
    assert [loop_start([1, 2, 3, 1, 2, 3, 1, 2], length) for length in (3, 5, 6)] == [3, 3, 8]
    ids = [*range(70)] * 2
    row = answer(1, "qa", [([4] * 35, 1.0), ([1, 2, 1], 1.0)], output_ids=[ids, [7, 7, 7, 7]])
    assert counts_between(row, 0, 1000) == (144, 38)
    assert counts_between(row, 1, 8) == (4 + 3, 1 + 2), "steps that begin at 4; and at 1 and 3"
    assert counts_between(row, 0, 1000, loops=False) == (18 * 4 + 4, 18 + 3), (
        "the last one begins at 68, before 70"
    )


def test_the_parts_of_a_step_are_means_over_steps_behind_the_prompt():
    times = [{"draft": 0.2, "forward": 0.4, "prefill": 1.0}]
    row = answer(1, "qa", [([2, 2], 1.0)], phase_time=times, forwards=[3])
    assert part_ms([row]) == pytest.approx({"part_draft_ms": 100.0, "part_forward_ms": 200.0})
