"""Two experiments next to each other: text, accepted lengths, where they differ first, and what decides."""

import json

import pytest

from evaluation import contribute, report
from evaluation.statistics.agreement import APART, EQUAL, OPEN, SIZES, TEXT, WITHIN, compare, summary
from tests.evaluation.made_runs import asked, made, shard, write

IDS = [11, 12, 13, 14, 15, 16]
BY_ONE, BY_TWO, BY_THREE = [1] * 6, [2, 2, 2], [3, 3]


def question(number, lengths, ids=IDS):
    """An answer in one turn to a question of that number."""
    more = {"output_ids": [ids], "step_nodes": [[4] * len(lengths)], "step_paths": [[[0]] * len(lengths)]}
    return asked(number, "qa", [(lengths, 1.0)], prompt=f"what is {number}?", **more)


def run(label, lengths, *, questions=range(8), ids=IDS, **more):
    """A run of these questions, all answered by these accepted lengths; a list a question, too."""
    each = lengths if isinstance(lengths[0], list) else [lengths] * len(questions)
    return shard(label, [question(n, own, ids) for n, own in zip(questions, each, strict=True)], **more)


def compared(here, there):
    """The only comparison of two runs."""
    ((comparison,), _) = compare([here], [there])
    return comparison


def test_the_same_run_on_another_machine_is_equal():
    here = run("recycling (hot)", BY_TWO, device="another machine", model={"path": "/home/x/toy", "device": "cuda"})
    found = compared(here, run("recycling (hot)", BY_TWO, model={"path": "toy", "device": "cpu"}))
    assert (found.verdict, found.questions, found.same_text, found.same_lengths) == (EQUAL, 8, 8, 8)
    assert found.mats == [2.0, 2.0] and found.ratio == (1.0, 1.0, 1.0) and not found.first
    assert summary([found]) == "token ids and accepted lengths equal in 1 of 1 configurations on 8 questions"


@pytest.mark.parametrize("tree", ["2.2.2", "auto"])
def test_another_text_of_the_same_accepted_lengths_is_wrong(tree):
    """Another model's text had been called equal, as vanilla's accepted lengths are ones everywhere."""
    here = run("vanilla", BY_ONE, ids=[11, 12, 13, 99, 15, 16], method={"tree": tree})
    found = compared(here, run("vanilla", BY_ONE, method={"tree": tree}))
    assert found.verdict == TEXT and (found.same_text, found.same_lengths) == (0, 8)
    assert found.first == "token ids differ first at question 0, turn 1, step 4"
    assert "0 of 1" in summary([found]) and "ANOTHER TEXT: vanilla" in summary([found])


def test_a_shorter_text_is_another():
    found = compared(shard("pld", [question(1, [2, 2], IDS[:4])]), shard("pld", [question(1, BY_TWO)]))
    assert found.verdict == TEXT and found.first == "token ids differ first at question 1, turn 1, step 3"


def test_one_question_of_many_with_a_step_more_is_within_the_interval():
    lengths = [BY_TWO, BY_THREE] * 10
    here, there = (run("pld", each, questions=range(20)) for each in ([*lengths[:19], [3, 2, 1]], lengths))
    found = compared(here, there)
    assert found.verdict == WITHIN and (found.same_text, found.same_lengths) == (20, 19)
    assert found.first == "accepted lengths differ first at question 19, turn 1, step 2"
    assert found.ratio[0] == pytest.approx(50 / 51) and found.ratio[1] < 1.0 <= found.ratio[2]


def test_another_tree_of_the_same_label_is_compared_and_differs():
    lengths = [BY_TWO] * 2 + [BY_THREE] * 6
    here = run("recycling (hot)", lengths, method={"tree": "best", "tree_nodes": 8})
    found = compared(here, run("recycling (hot)", BY_TWO, method={"tree": "2.2.2", "tree_nodes": 80}))
    assert found.verdict == APART and found.ratio[0] == pytest.approx(48 / 18 / 2) and found.ratio[1] > 1
    assert found.first == "accepted lengths differ first at question 2, turn 1, step 1"


def test_one_question_that_differs_has_no_interval_and_is_wrong():
    found = compared(run("pld", BY_ONE, questions=[1]), run("pld", BY_TWO, questions=[1]))
    assert found.verdict == APART and found.ratio[1] != found.ratio[1]


def test_drafts_sized_by_the_clock_may_differ_in_size():
    found = compared(*(run("recycling (auto)", own, method={"tree": "auto"}) for own in (BY_ONE, BY_TWO)))
    assert found.verdict == SIZES and found.ratio[0] == 0.5
    assert summary([found]).endswith("; text equal, sizes differ: recycling (auto)")


@pytest.mark.parametrize(("start", "verdict"), [("cold", APART), ("hot", OPEN)])
def test_state_behind_other_questions_does_not_decide(start, verdict):
    here = run(f"recycling ({start})", [BY_TWO, BY_ONE, BY_ONE, BY_ONE], questions=(0, 2, 4, 6))
    found = compared(here, run(f"recycling ({start})", BY_TWO))
    assert found.verdict == verdict and (found.questions, found.same_lengths) == (4, 1)


def test_the_part_before_the_first_left_out_question_decides():
    found = compared(run("recycling (hot)", BY_ONE, questions=(0, 1, 2, 5)), run("recycling (hot)", BY_TWO))
    assert found.verdict == APART


def test_every_repeat_is_compared_and_the_same_one_first():
    def repeats(second):
        return [run("pld", BY_TWO), run("pld", second, repeat=1)]

    assert compare(repeats(BY_ONE), repeats(BY_ONE))[0][0].verdict == EQUAL
    assert compare(repeats(BY_ONE), repeats(BY_TWO))[0][0].same_lengths == 0


def test_unfinished_repeats_are_no_disagreement():
    def unfinished(*answered):
        runs = [run("recycling (hot)", [BY_ONE] * 4 + [BY_THREE] * 4, repeat=repeat) for repeat in range(len(answered))]
        for one, count in zip(runs, answered, strict=True):
            del one.answers[count:]
        return runs

    for here, there in (((8, 4), (8,)), ((8,), (4, 8)), ((1, 8, 4), (8, 8))):
        ((found,), _) = compare(unfinished(*here), unfinished(*there))
        assert found.verdict == EQUAL and found.mats == pytest.approx([1.5, 1.5])


def test_configurations_pair_by_their_settings_and_the_rest_is_named():
    def sized(*sizes, **more):
        return [run("recycling (hot)", BY_TWO, method={"tree": "best", "tree_nodes": n}, **more) for n in sizes]

    found, alone = compare([*sized(8, 16), run("sps", BY_TWO)], [*sized(8, 4, 24), run("eagle", BY_TWO)])
    assert len(found) == 1 and alone == [
        "only here: recycling (hot), 16 nodes", "only here: sps",
        "only there: recycling (hot), 4 nodes", "only there: recycling (hot), 24 nodes", "only there: eagle",
    ]  # fmt: skip
    types = [sized(8, model={"dtype": dtype}) for dtype in ("bfloat16", "float32")]
    assert [c.verdict for c in compare(types[0] + types[1], types[1] + types[0])[0]] == [EQUAL, EQUAL]


def test_runs_without_hashes_are_compared_by_their_ids():
    rows = [made("pld", [{k: v for k, v in question(1, BY_TWO).items() if k != "question_sha256"}]) for _ in range(2)]
    assert compared(*rows).verdict == EQUAL


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where shipped records lie, with `study` in it, and a function that writes results."""
    reference = tmp_path / "reference"
    monkeypatch.setattr(contribute, "REFERENCE", reference)
    monkeypatch.setattr(report, "REFERENCE", reference)

    def results(where, lengths, ids=IDS, questions=range(8), name="study"):
        folder = tmp_path / where / name
        for one in (run("vanilla", BY_ONE, questions=questions), run("pld", lengths, ids=ids, questions=questions)):
            (write(one, folder) / "summary.json").write_text(json.dumps({"steps": 1}))
        return folder

    contribute.contribute(results("shipped", BY_TWO), "study")
    return reference / "study", results


def test_the_command_leaves_with_0_if_they_agree_and_1_if_not(folders, call):
    shipped, results = folders
    same = call(report.main, results("same", BY_TWO), "--against", shipped)
    assert same.code == 0 and "equal in 2 of 2 configurations" in same.out
    half = call(report.main, results("half", BY_TWO, questions=range(4)), "--against", shipped)
    assert half.code == 0 and "questions: 4 here, 8 there" in half.out
    other = call(report.main, results("sizes", BY_THREE), "--against", shipped)
    assert other.code == 1 and "text equal, LENGTHS DIFFER: pld" in other.out
    text = call(report.main, results("text", BY_TWO, IDS[::-1]), "--against", shipped)
    assert text.code == 1 and "ANOTHER TEXT: pld" in text.out and "question 0, turn 1, step 1" in text.out
    nothing = call(report.main, results("none", BY_TWO, questions=range(20, 22)), "--against", shipped)
    assert nothing.code == 2 and "no configuration that" in nothing.err and len(nothing.err.splitlines()) == 1
    assert "with an experiment's folder only" in call(report.main, "--answers", "x", "--against", shipped).err


def test_a_report_ends_with_how_it_agrees_with_the_shipped_experiment_of_its_name(folders, call):
    shipped, results = folders
    same, other = (
        call(report.main, results(name, own)).out.splitlines()[-1] for name, own in (("a", BY_TWO), ("b", BY_THREE))
    )
    said = "token ids and accepted lengths equal in {} of 2 configurations on 8 questions"
    assert same == f"against {shipped}: {said.format(2)}"
    assert other.startswith(f"against {shipped}: {said.format(1)}; text equal, LENGTHS DIFFER: pld; more: ")
    for quiet in (results("c", BY_TWO, name="another"), results("d", BY_TWO, questions=range(20, 22)), shipped):
        assert "against" not in call(report.main, quiet).out
