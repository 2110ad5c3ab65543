"""Two experiments next to each other: text, accepted lengths, where they differ first."""

import json

import numpy as np
import pytest

from evaluation import contribute, report
from evaluation.report import summary
from evaluation.statistics.agreement import EQUAL, LENGTHS, TEXT, audits, compare
from evaluation.statistics.pools import paired, pools
from tests.evaluation.made_runs import asked, on_paper, shard, write

IDS = [11, 12, 13, 14, 15, 16]
OTHER_TEXT = [11, 12, 13, 99, 15, 16]
BY_ONE = [1] * 6
BY_TWO = [2, 2, 2]
BY_THREE = [3, 3]
AUTO = {"tree": "auto"}
BEST = {"tree": "best", "tree_nodes": 8}


def run(label, lengths, *, first=0, ids=IDS, limit=16, **more):
    """A run of eight questions, answered by these accepted lengths; or by a list a question."""
    each = lengths if isinstance(lengths[0], list) else [lengths] * 8
    rows = []
    for number, steps in enumerate(each, start=first):
        prompt = f"what is {number}?"
        rows.append(asked(number, "qa", [(steps, 1.0)], prompt=prompt, output_ids=[ids]))
    made_run = shard(label, rows, **more)
    made_run.metadata["settings"]["max_new_tokens"] = limit
    return made_run


@pytest.mark.parametrize(
    ("here", "there", "verdict", "same_text", "same_lengths", "first"),
    [
        # on another machine; another model's text had been called equal, as vanilla's accepted lengths are ones
        (run("x", BY_TWO, device="b", model={"device": "cuda"}), run("x", BY_TWO), EQUAL, 8, 8, ""),
        (run("x", BY_ONE, ids=OTHER_TEXT), run("x", BY_ONE), TEXT, 0, 8, "token ids 0"),
        (run("x", [[2, 2]], ids=IDS[:4]), run("x", BY_TWO), TEXT, 0, 0, "token ids 0"),
        # drafts sized by the clock may differ in size; another type
        (run("x", BY_ONE, method=AUTO), run("x", BY_TWO, method=AUTO), LENGTHS, 8, 0, "accepted lengths 0"),
        (run("x", BY_TWO, model={"dtype": "bfloat16"}), run("x", BY_TWO), EQUAL, 8, 8, ""),
    ],
)  # fmt: skip
def test_what_two_runs_have_in_common(here, there, verdict, same_text, same_lengths, first):
    ((comparison,), _) = compare(pools([here]), pools([there]))
    assert comparison.verdict == verdict
    assert (comparison.same_text, comparison.same_lengths) == (same_text, same_lengths)
    what, _, question = first.rpartition(" ")
    expected = f"{what} differ first at question {question}, turn 1" if first else ""
    assert comparison.first == expected
    equal = f"token ids and accepted lengths equal in {int(verdict == EQUAL)} of 1 configurations"
    assert summary([comparison]).startswith(equal)


def test_every_repeat_is_compared_with_the_same_one():
    one = [run("pld", BY_TWO), run("pld", BY_ONE, repeat=1)]
    two = [run("pld", BY_TWO), run("pld", BY_TWO, repeat=1)]
    assert compare(pools(one), pools(one))[0][0].verdict == EQUAL
    assert compare(pools(one), pools(two))[0][0].same_lengths == 0


def test_configurations_pair_by_their_settings_and_the_rest_is_named():
    def sized(*sizes):
        return [run("x", BY_TWO, method=BEST | {"tree_nodes": nodes}) for nodes in sizes]

    here = pools([*sized(8, 16), run("sps", BY_TWO), run("pld", BY_TWO)])
    replayed = sized(8, 4, 24)
    for one in replayed:
        one.metadata["settings"]["execution"] = "graph"  # which changes neither text nor lengths
    there = pools([*replayed, run("pld", BY_TWO, limit=32), run("vanilla", BY_ONE, first=20)])
    pairs, alone = compare(here, there)
    assert [pair.name for pair in pairs] == ["x, 8 nodes"]
    names = ["only here: pld", "only here: sps", "only here: x, 16 nodes", "only there: pld"]
    assert sorted(alone) == [
        *names,
        "only there: vanilla",
        "only there: x, 24 nodes",
        "only there: x, 4 nodes",
    ]


def test_the_command_and_a_report_say_how_a_folder_agrees_with_a_shipped_one(
    tmp_path, monkeypatch, call
):
    """The command leaves with 1 for another text; a report looks for the shipped experiment of its name."""
    for module in (contribute, report):
        monkeypatch.setattr(module, "REFERENCE", tmp_path / "reference")

    def results(where, lengths, name="study", **more):
        folder = tmp_path / where / name
        for one in (run("vanilla", BY_ONE), run("pld", lengths, **more)):
            (write(one, folder) / "summary.json").write_text(json.dumps({"steps": 1}))
        return folder

    contribute.contribute(results("first", BY_TWO), "study-mine")
    shipped = tmp_path / "reference/study-mine"
    folders = {
        "same": results("same", BY_TWO),
        "sizes": results("sizes", BY_THREE),
        "text": results("text", BY_TWO, ids=OTHER_TEXT),
    }
    outcomes = {}
    for name, folder in folders.items():
        outcomes[name] = call(report.main, folder, "--against", shipped)
    assert [outcome.code for outcome in outcomes.values()] == [0, 0, 1]
    assert "equal in 2 of 2 configurations" in outcomes["same"].out
    assert f"{LENGTHS}: pld" in outcomes["sizes"].out
    assert f"{TEXT}: pld" in outcomes["text"].out and "question 0, turn 1" in outcomes["text"].out
    none = call(report.main, results("none", BY_TWO, limit=32), "--against", folders["same"])
    assert none.code == 0, "vanilla is in both"

    line = call(report.main, folders["same"]).out.splitlines()[-1]
    assert line.startswith("against ") and line.endswith(
        "equal in 2 of 2 configurations on 8 questions"
    )
    assert "--against" in call(report.main, folders["sizes"]).out.splitlines()[-1]
    for quiet in (results("other", BY_TWO, name="another"), shipped):
        assert "against" not in call(report.main, quiet).out


def prompted(label, prompts, **more):
    """A run of four questions, whose first prompts have these hashes."""
    rows = []
    for number, prompt in enumerate(prompts):
        choice = {"output_ids": [IDS]} | ({"prompt_sha256": [prompt]} if prompt else {})
        rows.append(asked(number, "qa", [(BY_ONE, 1.0)], prompt=f"{number}?", **choice))
    return shard(label, rows, **more)


@pytest.mark.parametrize(
    ("own", "equal"),
    [("abcd", 4), ("abxy", 2), ("wxyz", 0), (["a", None, "x", None], 3), ([None] * 4, 4)],
)
def test_only_answers_to_equal_prompts_are_compared(own, equal):
    """What has no hash, as older records, counts as before."""
    runs = [prompted("vanilla", "abcd"), prompted("pld", own)]
    (audit,) = audits(pools(runs))
    assert (audit.identical, audit.left_out) == (equal, 4 - equal)
    speeds = paired(audit.pool.speeds, audit.base.speeds, "speed")
    assert np.isfinite(speeds[0]).sum() == equal
    words = f"not compared, as prompts differ: pld with vanilla: {4 - equal} questions"
    assert (words in on_paper(runs)) is (equal < 4)

    found, alone = compare(pools(runs[1:]), pools([prompted("pld", "abcd")]))
    assert [one.questions for one in found] == [equal] * bool(equal)
    words = f"left out: {4 - equal} questions of pld, as their prompts differ"
    assert (words in alone) is (0 < equal < 4)

    other = prompted("vanilla", own, method={"k": 1})  # of several baselines, the one of most pairs
    (audit,) = [one for one in audits(pools([*runs, other])) if one.pool.label == "pld"]
    assert audit.identical == 4
