"""Two experiments next to each other: what is equal, where they differ first and why, and what decides."""

import itertools
import json
import random

import pytest

from evaluation import contribute, report
from evaluation.statistics.agreement import APART, EQUAL, OPEN, WITHIN, compare, lines, summary
from tests.evaluation.made_runs import asked, made, shard, write

IDS = [11, 12, 13, 14, 15, 16]
BY_ONE, BY_TWO, BY_THREE = [1] * 6, [2, 2, 2], [3, 3]


def question(number, lengths, ids=IDS, seconds=1.0, category="qa"):
    """An answer in one turn to a question of that number."""
    more = {"output_ids": [ids], "step_nodes": [[4] * len(lengths)], "step_paths": [[[0]] * len(lengths)]}
    return asked(number, category, [(lengths, seconds)], prompt=f"what is {number}?", **more)


def run(label, lengths, *, questions=range(8), **more):
    """A run of these questions, all answered by these accepted lengths; a list a question, too."""
    each = lengths if isinstance(lengths[0], list) else [lengths] * len(questions)
    return shard(label, [question(n, own) for n, own in zip(questions, each, strict=True)], **more)


def compared(here, there):
    """The only comparison of two runs."""
    (comparison,) = compare([here], [there]).comparisons
    return comparison


def test_the_same_run_on_another_machine_is_equal():
    here = run("recycling (hot)", BY_TWO, device="another machine", model={"path": "/home/x/toy", "device": "cuda"})
    there = run("recycling (hot)", BY_TWO, model={"path": "toy", "device": "cpu"})
    found = compared(here, there)
    assert (found.verdict, found.questions, found.equal, found.turns_alike) == (EQUAL, 8, 8, (8, 8))
    assert found.mats == (2.0, 2.0) and (found.low, found.high) == (1.0, 1.0)
    agreement = compare([here], [there])
    assert agreement.agrees and not any("differ" in line for line in lines(agreement))
    assert summary(agreement) == (
        "accepted lengths equal in 1 of 1 configurations on 8 questions; text equal in all 8 turns"
    )


def test_another_tree_is_found_with_its_first_step_and_its_setting():
    lengths = [BY_TWO] * 2 + [BY_THREE] * 6
    here = run("recycling (hot)", lengths, method={"tree": "best", "tree_nodes": 8, "tree_sha256": "1"})
    there = run("recycling (hot)", BY_TWO, method={"tree": "2.2.2", "tree_nodes": 80, "tree_sha256": "2"})
    found = compared(here, there)
    assert found.verdict == APART and not compare([here], [there]).agrees and found.equal == 2
    assert found.ratio == pytest.approx(48 / 18 / 2) and 1 < found.low < found.ratio < found.high
    assert found.difference.lengths == "question 2, turn 1, step 1: 3 and 2, on the same text"
    assert "method.tree is best here and 2.2.2 there" in found.reasons and "other tree" in found.reasons
    (line,) = [line for line in lines(compare([here], [there])) if line.startswith("recycling (hot): lengths differ")]
    assert "method.tree_nodes is 8 here and 80 there" in line
    assert "DIFFER: recycling (hot)" in summary(compare([here], [there]))


def test_a_file_changed_under_the_same_settings_is_another_tree():
    trees = [{"method": {"tree": "file", "tree_sha256": mark}, "draft_tree": [[int(mark)]]} for mark in "12"]
    found = compared(run("recycling", BY_TWO, **trees[0]), run("recycling", BY_THREE, **trees[1]))
    assert found.verdict == APART and found.reasons == ["other tree", "another draft tree"]


def test_a_few_steps_more_are_within_the_interval():
    rng = random.Random(0)
    lengths = [BY_TWO if rng.random() < 0.5 else BY_THREE for _ in range(60)]
    other = [*lengths]
    other[3], other[7] = BY_ONE, BY_ONE
    here, there = (run("pld", each, questions=range(60)) for each in (lengths, other))
    found = compared(here, there)
    assert found.verdict == WITHIN and found.equal == 58 and found.high >= 1.0 >= found.low
    assert compare([here], [there]).agrees and found.reasons == []
    assert "a tie of two logits" in lines(compare([here], [there]))[-1]


def test_with_half_the_questions_the_common_ones_decide():
    here, there = run("pld", BY_TWO, questions=range(0, 8, 2)), run("pld", BY_TWO)
    agreement = compare([here], [there])
    assert agreement.questions == (4, 8, 4) and agreement.comparisons[0].verdict == EQUAL
    assert "questions: 4 here, 8 there; compared on the 4 that both have" in lines(agreement)


@pytest.mark.parametrize(("start", "verdict", "decided"), [("cold", APART, 4), ("hot", OPEN, 1)])
def test_state_behind_other_questions_does_not_decide(start, verdict, decided):
    here = run(
        f"recycling ({start})", [BY_TWO, BY_ONE, BY_ONE, BY_ONE] if start == "hot" else BY_ONE, questions=(0, 2, 4, 6)
    )
    there = run(f"recycling ({start})", BY_TWO)
    found = compared(here, there)
    assert found.verdict == verdict and len(found.decided) == decided
    assert any("behind other questions in 3" in reason for reason in found.reasons) is (start == "hot")
    assert compare([here], [there]).agrees is (start == "hot")


def test_the_part_before_the_first_left_out_question_decides():
    here = run("recycling (hot)", BY_ONE, questions=(0, 1, 2, 5))
    found = compared(here, run("recycling (hot)", BY_TWO))
    assert len(found.decided) == 3 and found.verdict == APART


def test_state_kept_within_a_subtask_is_the_same_where_its_own_questions_are():
    def kept(numbers, lengths):
        rows = [question(n, lengths, category=category) for n, category in numbers]
        return shard("recycling (category)", rows)

    there = kept([(0, "qa"), (1, "qa"), (2, "rag"), (3, "rag")], BY_TWO)
    found = compared(kept([(0, "qa"), (2, "rag"), (3, "rag")], BY_ONE), there)
    assert len(found.decided) == 3 and found.verdict == APART


def test_one_question_that_differs_has_no_interval_and_disagrees():
    found = compared(run("pld", BY_ONE, questions=[1]), run("pld", BY_TWO, questions=[1]))
    assert found.verdict == APART and found.low != found.low


@pytest.mark.parametrize("tree", ["auto", "online"])
def test_a_tree_that_follows_the_clock_decides_nothing(tree):
    here, there = (run(f"recycling ({tree})", lengths, method={"tree": tree}) for lengths in (BY_ONE, BY_TWO))
    agreement = compare([here], [there])
    assert agreement.comparisons[0].verdict == OPEN and agreement.agrees
    assert agreement.comparisons[0].reasons[0] == "the tree follows the machine's step times"
    assert agreement.comparisons[0].ratio == 0.5  # shown all the same
    assert f"not decided: recycling ({tree})" in summary(agreement)


def test_another_text_is_reported_with_its_token_and_what_may_be_why():
    more = [
        {"model": {"dtype": dtype, "files": {"weights": dtype}}, "circumstances": {"versions": {"torch": dtype}}}
        for dtype in ("float16", "float32")
    ]
    here = shard("pld", [question(1, [2, 2, 2], [11, 12, 13, 99, 15, 16]), question(2, BY_TWO)], **more[0])
    there = shard("pld", [question(1, [2, 1, 3]), question(2, BY_TWO)], **more[1])
    found = compared(here, there)
    assert found.difference.text == "question 1, turn 1, token 4" and found.turns_alike == (1, 2)
    assert found.difference.lengths == "question 1, turn 1, step 2: 2 and 1, text differs at 4"
    assert found.reasons == [
        "model.dtype is float16 here and float32 there",
        "other weights",
        "versions.torch is float16 here and float32 there",
    ]
    assert "text equal in 1 of 2 turns" in summary(compare([here], [there]))


def test_text_that_differs_behind_the_step_is_no_reason_for_it():
    here = shard("pld", [question(1, [1, 3, 2], [11, 12, 13, 14, 15, 99])])
    found = compared(here, shard("pld", [question(1, BY_TWO)]))
    assert found.difference.lengths == "question 1, turn 1, step 1: 1 and 2, on the same text"
    assert found.difference.text == "question 1, turn 1, token 6"


def test_a_turn_behind_another_text_says_so():
    both = [
        asked(1, "qa", [(BY_TWO, 1.0), (lengths, 1.0)], output_ids=[ids, IDS])
        for lengths, ids in ((BY_TWO, IDS), (BY_THREE, [1, *IDS[1:]]))
    ]
    found = compared(*(shard("pld", [row]) for row in both))
    assert found.difference.lengths == "question 1, turn 2, step 1: 2 and 3, behind a turn whose text differs"


def test_a_shorter_answer_ends_in_a_step_that_is_not_there():
    found = compared(shard("pld", [question(1, [2, 2], IDS[:4])]), shard("pld", [question(1, BY_TWO)]))
    assert found.difference.lengths == "question 1, turn 1, step 3: no step and 2, text differs at 5"


def test_every_repeat_is_compared_and_the_same_one_first():
    def repeats(second):
        return [run("pld", BY_TWO), run("pld", second, repeat=1)]

    assert compare(repeats(BY_ONE), repeats(BY_ONE)).comparisons[0].verdict == EQUAL
    found = compare(repeats(BY_ONE), repeats(BY_TWO)).comparisons[0]
    assert found.equal == 0 and found.turns_alike == (16, 16)


def unfinished(lengths, *answered):
    """Repeats of eight questions, of which each has answered so many."""
    runs = [run("recycling (hot)", lengths, repeat=repeat) for repeat in range(len(answered))]
    for one, count in zip(runs, answered, strict=True):
        del one.answers[count:]
    return runs


SLOW_THEN_FAST = [BY_ONE] * 4 + [BY_THREE] * 4
ONE_STEP_MORE = [*SLOW_THEN_FAST[:7], [3, 2, 1]]


@pytest.mark.parametrize("answered", [(8, 8, 8), (8, 8, 4), (8, 4), (8, 1, 1), (4, 8), (1, 8, 4)])
@pytest.mark.parametrize(("lengths", "verdict"), [(SLOW_THEN_FAST, EQUAL), (ONE_STEP_MORE, WITHIN), (BY_ONE, APART)])
def test_unfinished_repeats_are_no_disagreement(answered, lengths, verdict):
    """Questions that more repeats have answered weigh no more than the others, on either side."""
    for swapped in (False, True):
        sides = [unfinished(SLOW_THEN_FAST, *answered), unfinished(lengths, 8)]
        (found,) = compare(*(sides[::-1] if swapped else sides)).comparisons
        mat = {EQUAL: 48 / 32, WITHIN: 48 / 33, APART: 1.0}[verdict]
        assert found.verdict == verdict and found.decided == list(found.difference.equal) and found.questions == 8
        assert found.mats == pytest.approx((mat, 1.5) if swapped else (1.5, mat))
        assert found.ratio == pytest.approx(found.mats[0] / found.mats[1])


def test_configurations_pair_by_their_settings_and_the_rest_is_named():
    def sized(*sizes):
        return [run("recycling (hot)", BY_TWO, method={"tree": "best", "tree_nodes": n}) for n in sizes]

    agreement = compare(sized(8, 16, 24), sized(4, 8, 24))  # one of a label left on either side: 16 and 4
    assert [c.verdict for c in agreement.comparisons] == [EQUAL] * 3
    assert ["method.tree_nodes is 16 here and 4 there"] in [c.reasons for c in agreement.comparisons]
    agreement = compare([*sized(8, 16), run("sps", BY_TWO)], [*sized(8, 4, 24), run("eagle", BY_TWO)])
    assert len(agreement.comparisons) == 1
    assert agreement.only_here == ["recycling (hot), 16 nodes", "sps"]
    assert agreement.only_there == ["recycling (hot), 4 nodes", "recycling (hot), 24 nodes", "eagle"]
    told = lines(agreement)
    assert told[-2] == "only here: recycling (hot), 16 nodes; sps" and told[-1].startswith("only there: ")


def test_of_several_types_the_same_one_is_compared():
    def typed(*dtypes):
        return [run("pld", BY_TWO if d == "float32" else BY_ONE, model={"dtype": d}) for d in dtypes]

    agreement = compare(typed("bfloat16", "float32"), typed("float32", "bfloat16"))
    assert [c.verdict for c in agreement.comparisons] == [EQUAL, EQUAL]
    assert {c.name for c in agreement.comparisons} == {f"pld (toy, {d}, file, 16)" for d in ("bfloat16", "float32")}


def test_speedups_are_shown_and_decide_nothing():
    def timed(seconds, **more):
        rows = [question(n, BY_TWO, seconds=seconds) for n in range(3)]
        return [run("vanilla", BY_ONE, questions=range(3), **more), shard("pld", rows, **more)]

    agreement = compare(timed(0.5, device="fast"), timed(2.0))
    pld = next(c for c in agreement.comparisons if c.name == "pld")
    assert pld.speedups == pytest.approx((2.0, 0.5)) and pld.verdict == EQUAL
    row = next(line for line in lines(agreement) if line.startswith("pld"))
    assert row.split()[-3:] == ["2.00", "0.50", "equal"]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where shipped records lie, with `study` in it, and a function that writes results."""
    reference, count = tmp_path / "reference", itertools.count()
    monkeypatch.setattr(contribute, "REFERENCE", reference)
    monkeypatch.setattr(report, "REFERENCE", reference)

    def results(lengths, questions=range(8), name="study"):
        folder = tmp_path / str(next(count)) / name
        for one in (run("vanilla", BY_ONE, questions=questions), run("pld", lengths, questions=questions)):
            (write(one, folder) / "summary.json").write_text(json.dumps({"steps": 1}))
        return folder

    contribute.contribute(results(BY_TWO), "study")
    return reference / "study", results


def test_the_command_leaves_with_0_if_they_agree_and_1_if_not(folders, call):
    shipped, results = folders
    same = call(report.main, results(BY_TWO), "--against", shipped)
    assert same.code == 0 and "accepted lengths equal in 2 of 2 configurations" in same.out
    half = call(report.main, results(BY_TWO, range(4)), "--against", shipped)
    assert half.code == 0 and "questions: 4 here, 8 there; compared on the 4 that both have" in half.out
    other = call(report.main, results(BY_THREE), "--against", shipped)
    assert other.code == 1 and "pld: lengths differ first at question 0" in other.out and "DIFFER: pld" in other.out
    nothing = call(report.main, results(BY_TWO, range(20, 22)), "--against", shipped)
    assert nothing.code == 2 and "no configuration that" in nothing.err and len(nothing.err.splitlines()) == 1
    assert call(report.main, shipped, "--against", results(BY_TWO)).code == 0


def test_the_command_takes_unfinished_repeats(call, tmp_path):
    for name, lengths, answered in (
        ("there", ONE_STEP_MORE, (8,)),
        ("here", SLOW_THEN_FAST, (8, 8, 4)),
        ("other", BY_ONE, (8, 8, 4)),
    ):
        for one in unfinished(lengths, *answered):
            write(one, tmp_path / name)
    same = call(report.main, tmp_path / "here", "--against", tmp_path / "there")
    assert same.code == 0 and not same.err and "differ within the interval: recycling (hot)" in same.out
    assert call(report.main, tmp_path / "there", "--against", tmp_path / "here").code == 0
    other = call(report.main, tmp_path / "other", "--against", tmp_path / "there")
    assert other.code == 1 and "DIFFER: recycling (hot)" in other.out


def test_what_goes_with_against(folders, call, tmp_path):
    shipped, results = folders
    assert "with an experiment's folder only" in call(report.main, "--answers", "x", "--against", shipped).err
    assert "--parquet" in call(report.main, results(BY_TWO), "--against", shipped, "--parquet", tmp_path).err
    assert "no runs here" in call(report.main, results(BY_TWO), "--against", tmp_path / "none").err


def test_a_report_ends_with_how_it_agrees_with_the_shipped_experiment_of_its_name(folders, call):
    shipped, results = folders
    lines_of = [call(report.main, results(lengths)).out.splitlines() for lengths in (BY_TWO, BY_THREE)]
    equal = (
        f"against {shipped}: accepted lengths equal in 2 of 2 configurations on 8 questions; text equal in all 16 turns"
    )
    assert lines_of[0][-1] == equal
    assert "DIFFER: pld" in lines_of[1][-1] and f"--against {shipped}" in lines_of[1][-1]
    for quiet in (results(BY_TWO, name="another"), results(BY_TWO, range(20, 22)), shipped):
        assert "against" not in call(report.main, quiet).out


def test_runs_without_hashes_are_compared_by_their_ids():
    rows = [made("pld", [{k: v for k, v in question(1, BY_TWO).items() if k != "question_sha256"}]) for _ in range(2)]
    assert compared(*rows).verdict == EQUAL
