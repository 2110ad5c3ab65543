"""Two experiments next to each other: text, accepted lengths, where they differ first."""

import json

import numpy as np
import pytest

from evaluation import contribute, report
from evaluation.statistics.agreement import EQUAL, LENGTHS, TEXT, audits, compared
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
    ("here", "there", "verdict"),
    [
        # on another machine; another model's text had been called equal, as vanilla's accepted lengths are ones
        (run("x", BY_TWO, device="b"), run("x", BY_TWO), EQUAL),
        (run("x", BY_ONE, ids=OTHER_TEXT), run("x", BY_ONE), TEXT),
        (run("x", [[2, 2]], ids=IDS[:4]), run("x", BY_TWO), TEXT),
        # drafts sized by the clock may differ in size
        (run("x", BY_ONE, method=AUTO), run("x", BY_TWO, method=AUTO), LENGTHS),
    ],
)  # fmt: skip
def test_what_two_runs_have_in_common(here, there, verdict):
    assert compared(pools([here]), pools([there])) == {verdict: ["x"]}


def test_configurations_pair_by_their_settings():
    def sized(*sizes):
        return [run("x", BY_TWO, method=BEST | {"tree_nodes": nodes}) for nodes in sizes]

    here = pools([*sized(8, 16), run("sps", BY_TWO), run("pld", BY_TWO)])
    replayed = sized(8, 4, 24)
    for one in replayed:
        one.metadata["settings"]["execution"] = "graph"  # which changes neither text nor lengths
    there = pools([*replayed, run("pld", BY_TWO, limit=32), run("vanilla", BY_ONE, first=20)])
    assert compared(here, there) == {EQUAL: ["x, 8 nodes"]}


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

    shipped = contribute.contribute(results("first", BY_TWO), "study").parent
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
    assert f"{TEXT}: pld" in outcomes["text"].out
    none = results("none", BY_TWO, name="x")
    for path in none.glob("runs/*/metadata.json"):
        path.write_text(path.read_text().replace('"max_new_tokens": 16', '"max_new_tokens": 8'))
    refused = call(report.main, none, "--against", shipped)
    assert refused.code == 2 and "has no configuration in common" in refused.err

    line = call(report.main, folders["same"]).out.splitlines()[-1]
    assert line.startswith("against ") and line.endswith("equal in 2 of 2 configurations")
    for quiet in (
        none.rename(none.with_name("study")),
        results("other", BY_TWO, name="another"),
        shipped,
    ):
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

    other = prompted("vanilla", own, method={"k": 1})  # of several baselines, the one of most pairs
    (audit,) = [one for one in audits(pools([*runs, other])) if one.pool.label == "pld"]
    assert audit.identical == 4
