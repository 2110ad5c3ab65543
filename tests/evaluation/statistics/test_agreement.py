"""Two experiments next to each other: text, accepted lengths, where they differ first."""

import json

import pytest

from evaluation import contribute, report
from evaluation.report import in_words, summary
from evaluation.statistics.agreement import CUT, EQUAL, LENGTHS, ROUNDED, TEXT, compare
from evaluation.statistics.pools import pools
from tests.evaluation.made_runs import asked, made, shard, write

IDS = [11, 12, 13, 14, 15, 16]
BY_ONE, BY_TWO, BY_THREE = [1] * 6, [2, 2, 2], [3, 3]


def question(number, lengths, ids=IDS):
    """An answer in one turn to a question of that number."""
    more = {
        "output_ids": [ids],
        "step_nodes": [[4] * len(lengths)],
        "step_paths": [[[0]] * len(lengths)],
    }
    return asked(number, "qa", [(lengths, 1.0)], prompt=f"what is {number}?", **more)


def run(label, lengths, *, questions=range(8), ids=IDS, **more):
    """A run of these questions, all answered by these accepted lengths; or by a list a question."""
    each = lengths if isinstance(lengths[0], list) else [lengths] * len(questions)
    numbers = range(len(each)) if len(each) != len(questions) else questions
    return shard(
        label, [question(n, own, ids) for n, own in zip(numbers, each, strict=True)], **more
    )


def sampled(label, ids):
    made_run = run(label, BY_ONE, ids=ids)
    made_run.metadata["settings"]["sampling"] = {"temperature": 0.7}
    return made_run


def only(here, there):
    """The only comparison of two runs."""
    ((comparison,), _) = compare(pools([here]), pools([there]))
    return comparison


AUTO, BEST = {"tree": "auto"}, {"tree": "best", "tree_nodes": 8}
MIXED, LARGER = [BY_TWO, BY_THREE] * 10, [BY_TWO] * 2 + [BY_THREE] * 6
OTHER_TEXT = [11, 12, 13, 99, 15, 16]
SERVED = {"drafter": "server", "engine": "vllm", "version": "1", "model": "m"}


@pytest.mark.parametrize(
    ("here", "there", "verdict", "same_text", "same_lengths", "first"),
    [
        # on another machine; another model's text had been called equal, as vanilla's accepted lengths are ones
        (run("pld", BY_TWO, device="b", model={"device": "cuda"}), run("pld", BY_TWO), EQUAL, 8, 8, ""),
        (run("vanilla", BY_ONE, ids=OTHER_TEXT), run("vanilla", BY_ONE), TEXT, 0, 8, "token ids 0 1 4"),
        (run("x", BY_ONE, ids=OTHER_TEXT, method=AUTO), run("x", BY_TWO, method=AUTO), TEXT, 0, 0, "token ids 0 1 4"),
        (run("x", [[2, 2]], questions=[1], ids=IDS[:4]), run("x", BY_TWO), TEXT, 0, 0, "token ids 1 1 3"),
        (*[made("x", [{k: v for k, v in question(1, BY_TWO).items() if k != "question_sha256"}])] * 2, EQUAL, 1, 1, ""),
        # drafts sized by the clock may differ in size; another tree of the same label; without an interval
        (run("x", BY_ONE, method=AUTO), run("x", BY_TWO, method=AUTO), LENGTHS, 8, 0, "accepted lengths 0 1 1"),
        (run("x", LARGER, method=BEST), run("x", BY_TWO, method=AUTO | {"tree": "2.2.2"}), LENGTHS, 8, 2,
         "accepted lengths 2 1 1"),
        (run("pld", BY_ONE), run("pld", BY_TWO), LENGTHS, 8, 0, "accepted lengths 0 1 1"),
        (run("pld", BY_ONE, questions=[1]), run("pld", BY_TWO, questions=[1]), LENGTHS, 1, 0, "accepted lengths 1 1 1"),
        (run("x", [*MIXED[:19], [3, 2, 1]]), run("x", MIXED), LENGTHS, 20, 19, "accepted lengths 19 1 2"),
        # another processor rounds 16-bit numbers otherwise, and a server all numbers
        *((run("hf", BY_ONE, ids=ids, model={"dtype": dtype}), run("hf", lengths, model={"dtype": "bfloat16"}),
           ROUNDED, 0, 8 * (ids is OTHER_TEXT), "token ids 0 1 4")
          for dtype, ids, lengths in (("bfloat16", OTHER_TEXT, BY_ONE), ("float16", OTHER_TEXT, BY_ONE))),
        (run("x", BY_ONE, ids=OTHER_TEXT, method=AUTO, model={"dtype": "float16"}),
         run("x", BY_TWO, method=AUTO, model={"dtype": "float16"}), ROUNDED, 0, 0, "token ids 0 1 4"),
        (run("pld", BY_ONE, model={"dtype": "bfloat16"}), run("pld", BY_TWO, model={"dtype": "bfloat16"}),
         LENGTHS, 8, 0, "accepted lengths 0 1 1"),
        # torch's generator draws for hf, this engine's own noise for others
        *((sampled(label, OTHER_TEXT), sampled(label, IDS), verdict, 0, 8, "token ids 0 1 4")
          for label, verdict in (("hf", ROUNDED), ("vanilla", TEXT))),
        (run("vllm", BY_ONE, ids=OTHER_TEXT, method=SERVED), run("vllm", BY_ONE, method=SERVED), ROUNDED, 0, 8,
         "token ids 0 1 4"),
    ],
)  # fmt: skip
def test_what_two_runs_have_in_common(here, there, verdict, same_text, same_lengths, first):
    comparison = only(here, there)
    assert (comparison.verdict, comparison.same_text, comparison.same_lengths) == (
        verdict,
        same_text,
        same_lengths,
    )
    what, *place = first.rsplit(" ", 3)
    said = "{} differ first at question {}, turn {}, step {}".format(what, *place) if first else ""
    assert comparison.first == said
    equal = f"token ids and accepted lengths equal in {int(verdict == EQUAL)} of 1 configurations"
    assert summary([comparison]).startswith(equal)
    assert summary([comparison]).endswith(f"; {verdict}: {here.label}") is (verdict != EQUAL)


def limited(limit, *turns):
    """A run of one question, its turns cut at a limit of new tokens."""
    lengths, more = [([1] * len(ids), 1.0) for ids in turns], {"output_ids": list(turns)}
    made_run = made("pld", [asked(1, "qa", lengths, **more)])
    made_run.metadata["settings"]["max_new_tokens"] = limit
    return made_run


def test_runs_with_other_limits_of_new_tokens_are_compared_as_far_as_both_go():
    """All of them had been called another text."""
    full = limited(6, IDS, [21, 22])
    # the second turn's prompt differs
    for there in (
        limited(4, IDS[:4], [31, 32]),
        limited(8, [*IDS, 17, 18], [31]),
    ):
        comparison = only(full, there)
        assert (comparison.verdict, comparison.same_text, comparison.same_lengths) == (CUT, 1, None)
        assert "  -  " in in_words([comparison])[1]
    for there, where in (
        (limited(4, [11, 12, 99, 14], [31]), "turn 1, token 3"),
        (limited(4, IDS[:3], [31]), "turn 1, token 4"),  # it has ended before its limit
        (limited(8, IDS, [21, 23]), "turn 2, token 2"),
    ):
        comparison = only(full, there)
        assert (
            comparison.verdict == TEXT
            and comparison.first == f"token ids differ first at question 1, {where}"
        )


def test_the_ratio_of_mats_and_its_interval():
    less = only(run("pld", [*MIXED[:19], [3, 2, 1]]), run("pld", MIXED)).ratio
    assert less[0] == pytest.approx(50 / 51) and less[1] < 1.0 <= less[2]
    equal = only(run("pld", BY_TWO), run("pld", BY_TWO))
    assert equal.mats == [2.0, 2.0] and equal.ratio == (1.0, 1.0, 1.0)
    larger = only(run("pld", LARGER), run("pld", BY_TWO)).ratio
    assert larger[0] == pytest.approx(48 / 18 / 2) and larger[1] > 1


def test_every_repeat_is_compared_with_the_same_one_first_and_unfinished_ones_do_not_disagree():
    one, two = ([run("pld", BY_TWO), run("pld", second, repeat=1)] for second in (BY_ONE, BY_TWO))
    assert (
        compare(pools(one), pools(one))[0][0].verdict == EQUAL
        and compare(pools(one), pools(two))[0][0].same_lengths == 0
    )

    def unfinished(*answered):
        runs = [
            run("recycling (hot)", [BY_ONE] * 4 + [BY_THREE] * 4, repeat=repeat)
            for repeat in range(len(answered))
        ]
        for one, count in zip(runs, answered, strict=True):
            del one.answers[count:]
        return runs

    for here, there in (((8, 4), (8,)), ((8,), (4, 8)), ((1, 8, 4), (8, 8))):
        ((comparison,), _) = compare(pools(unfinished(*here)), pools(unfinished(*there)))
        assert comparison.verdict == EQUAL and comparison.mats == pytest.approx([1.5, 1.5])


def test_configurations_pair_by_their_settings_and_the_rest_is_named():
    def sized(*sizes, **more):
        return [
            run("recycling (hot)", BY_TWO, method=BEST | {"tree_nodes": n}, **more) for n in sizes
        ]

    pairs, alone = compare(
        pools([*sized(8, 16), run("sps", BY_TWO)]), pools([*sized(8, 4, 24), run("eagle", BY_TWO)])
    )
    assert len(pairs) == 1 and alone == [
        "only here: recycling (hot), 16 nodes", "only here: sps",
        "only there: recycling (hot), 4 nodes", "only there: recycling (hot), 24 nodes", "only there: eagle",
    ]  # fmt: skip
    types = [sized(8, model={"dtype": dtype}) for dtype in ("bfloat16", "float32")]
    assert [
        c.verdict for c in compare(pools(types[0] + types[1]), pools(types[1] + types[0]))[0]
    ] == [
        EQUAL,
        EQUAL,
    ]


def test_the_command_and_a_report_say_how_a_folder_agrees_with_a_shipped_one(
    tmp_path, monkeypatch, call
):
    """The command leaves with 1 for another text; a report looks for the shipped experiment of its name."""
    for module in (contribute, report):
        monkeypatch.setattr(module, "REFERENCE", tmp_path / "reference")

    def results(where, lengths, ids=IDS, questions=range(8), name="study", dtype="float32"):
        folder, drafted = tmp_path / where / name, {"ids": ids, "model": {"dtype": dtype}}
        for one in (
            run("vanilla", BY_ONE, questions=questions),
            run("pld", lengths, questions=questions, **drafted),
        ):
            (write(one, folder) / "summary.json").write_text(json.dumps({"steps": 1}))
        return folder

    contribute.contribute(results("first", BY_TWO), "study")
    shipped = tmp_path / "reference/study"
    folders = {
        "same": results("same", BY_TWO),
        "half": results("half", BY_TWO, questions=range(4)),
        "sizes": results("sizes", BY_THREE),
        "text": results("text", BY_TWO, IDS[::-1]),
        "none": results("none", BY_TWO, questions=range(20, 22)),
        "rounded": results("rounded", BY_TWO, IDS[::-1], dtype="bfloat16"),
    }
    outcomes = {
        name: call(report.main, folder, "--against", shipped) for name, folder in folders.items()
    }
    assert [outcome.code for outcome in outcomes.values()] == [0, 0, 0, 1, 2, 0]
    assert f"{ROUNDED}: pld" in outcomes["rounded"].out
    assert (
        "equal in 2 of 2 configurations" in outcomes["same"].out
        and "questions: 4 here" in outcomes["half"].out
    )
    assert "text equal, lengths differ: pld" in outcomes["sizes"].out
    assert (
        "ANOTHER TEXT: pld" in outcomes["text"].out
        and "question 0, turn 1, step 1" in outcomes["text"].out
    )
    assert (
        "no configuration that" in outcomes["none"].err
        and len(outcomes["none"].err.splitlines()) == 1
    )
    assert (
        "with an experiment's folder only"
        in call(report.main, "--answers", "x", "--against", shipped).err
    )
    last = {
        name: call(report.main, folders[name]).out.splitlines()[-1] for name in ("same", "sizes")
    }
    line = f"against {shipped}: token ids and accepted lengths equal in {{}} of 2 configurations on 8 questions"
    assert last["same"] == line.format(2)
    assert last["sizes"].startswith(f"{line.format(1)}; text equal, lengths differ: pld; more: ")
    # begins with the word of the shipped one's name
    part = results("part", BY_TWO, name="study-of-mine")
    assert call(report.main, part).out.splitlines()[-1].startswith(f"against {shipped}: token ids")
    contribute.contribute(results("own", BY_TWO, name="study-of"), "study-of")
    assert (
        "against " + str(shipped.with_name("study-of"))
        in call(report.main, tmp_path / "own/study-of").out
    )
    for quiet in (results("other", BY_TWO, name="another"), folders["none"], shipped):
        assert "against" not in call(report.main, quiet).out


def test_variants_of_a_label_pair_across_limits():
    """They had been found on one side only each."""
    here, there = (
        [run("x", BY_TWO, method=BEST | {"tree_nodes": n}) for n in (8, 16)] for _ in range(2)
    )
    for one in there:
        one.metadata["settings"] |= {"max_new_tokens": 32, "timed": False, "execution": "graph"}
    pairs, alone = compare(pools(here), pools(there))
    assert [pair.verdict for pair in pairs] == [CUT, CUT] and alone == []
