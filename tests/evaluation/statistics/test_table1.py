"""The paper's Table 1 with measured rows: what each row is of, and what may stand among the published ones."""

import math
import re

import pandas as pd

from evaluation.statistics.experiment import Experiment
from evaluation.statistics.published import default_settings, read_published, table1
from evaluation.statistics.rendering import write_table1
from tests.evaluation.made_runs import answer, asked, made, shard


def pair(
    bench,
    answered,
    questions,
    category="qa",
    model="vicuna-7b",
    execution="eager",
    method=None,
    **more,
):
    """AR at a token a second and Token Recycling at two, with so many answers of so many questions.

    `method`: settings of Token Recycling that are not the published ones.
    """
    runs = []
    for label, lengths, seconds in (("hf", [1, 1], 2.0), ("recycling (hot)", [2], 1.0)):
        rows = [answer(i, category, [(lengths, seconds)]) for i in range(answered)]
        own = (
            {"tree": "2.2.2", **default_settings("recycling"), **(method or {})}
            if label != "hf"
            else {}
        )
        about = {
            "bench": {"name": bench},
            "model": {"name": model, "dtype": "float16"},
            "method": own,
        }
        run = made(label, rows, questions=questions, **about)
        run.metadata["settings"] |= {"max_new_tokens": 1024, "execution": execution} | more
        runs.append(run)
    return runs


def measured(runs):
    table = table1(Experiment(runs).table)
    return table[table["source"] == "measured"]


def test_published_rows_are_the_papers_and_ours_stand_below():
    code = [answer(i, "code", [([2, 2], 1.0)]) for i in (9, 10)]
    base = [answer(1, "qa", [([1] * 4, 4.0)]), answer(2, "writing", [([1] * 4, 2.0)])]
    fast = [answer(1, "qa", [([2, 2], 2.0)]), answer(2, "writing", [([4], 1.0)])]
    runs = [
        made(label, rows, bench={"name": bench}, model={"name": "vicuna-7b"})
        for label, questions in (("hf", base), ("recycling (hot)", fast))
        for bench, rows in (("spec_bench", questions), ("mbpp", code))
    ]
    table = table1(Experiment(runs).table)
    published = table[table["source"] == "published"].set_index(["model", "method"])
    paper = pd.DataFrame(read_published("paper_table1")).set_index(["model", "method"])
    columns = ["mt", "rag", "specbench_mat", "specbench_speedup", "mbpp_speedup"]
    pd.testing.assert_frame_equal(published.loc[paper.index, columns], paper[columns])
    names = table[table["model"] == "vicuna-7b"]["name"].tolist()
    assert names == [
        "AR",
        "AR",
        "Lookahead",
        "PLD",
        "REST",
        "Medusa",
        "Token Recycling",
        "Token Recycling",
    ]
    ours = table[(table["source"] == "measured") & (table["method"] == "recycling")].iloc[0]
    assert (ours["qa"], ours["mt"], ours["specbench_speedup"]) == (2.0, 2.0, 2.0)
    assert ours["specbench_mat"] == 8 / 3 and ours["specbench_tokens_per_second"] == 3.0
    assert ours["mbpp_mat"] == 2.0 and ours["mbpp_speedup"] == 1.0 and math.isnan(ours["rag"])


def test_of_several_runs_that_of_most_questions_counts():
    """A part of the bench had replaced the whole, as 60 sorts behind 480."""

    def runs_of(count, seconds):
        labels = (("hf", [1] * 4, 4.0), ("recycling (hot)", [2, 2], seconds))
        rows = {
            label: [asked(i, "qa", [(lengths, time)]) for i in range(count)]
            for label, lengths, time in labels
        }
        return [
            shard(label, answers, bench={"name": "spec_bench"}) for label, answers in rows.items()
        ]

    for runs in (runs_of(480, 2.0) + runs_of(60, 1.0), runs_of(60, 1.0) + runs_of(480, 2.0)):
        ours = measured(runs)
        assert ours["specbench_questions"].tolist() == [480, 480] and ours["qa"].tolist() == [
            1.0,
            2.0,
        ]


def test_a_measured_row_says_of_what_it_is(tmp_path):
    for runs, words in (
        (pair("spec_bench", 480, 480), "spec_bench, 480 questions"),
        (pair("spec_bench", 3, 480), "spec_bench, 3 of 480 questions, incomplete"),
        (pair("mbpp", 3, 60, category="code"), "mbpp, 3 of 60 questions of its 399, incomplete"),
        (pair("spec_bench", 480, 480, max_new_tokens=64), "spec_bench, 480 questions; max_new_tokens 64"),
        (pair("spec_bench", 9, 480) + pair("mbpp", 399, 399, "code"),
         "spec_bench, 9 of 480 questions, incomplete; mbpp, 399 questions"),
    ):  # fmt: skip
        ours = measured(runs)
        assert ours["measured"].tolist() == [words] * 2
        assert ours["complete"].tolist() == ["incomplete" not in words] * 2
        assert ours["execution"].tolist() == ["transformers generate", "eager"]
        write_table1(Experiment(runs).table, tmp_path)
        written = [
            (tmp_path / f"table1.{kind}").read_text().replace("\\_", "_")
            for kind in ("csv", "md", "tex")
        ]
        assert words in written[0] and f"| measured: {words}; eager |" in written[1]
        assert f"& measured: {words}; eager &" in written[2]


def test_a_measured_row_names_what_published_ones_have_otherwise():
    """Only phases, order and quantised weights had been named: other trees and settings stood there as the paper's."""
    for settings, own, words in (
        ({"num_choices": 2}, {}, ", num_choices 2"),
        ({"sampling": {"repetition_penalty": 1.3}}, {}, ", repetition_penalty 1.3"),
        ({"timed": False}, {}, ", timed False"),
        ({}, {"k": 4, "update": "path"}, ", k 4, update path"),
        ({}, {"tree": "best"}, ", tree best"),
    ):
        of_hf, of_method = measured(pair("spec_bench", 480, 480, method=own, **settings))[
            "measured"
        ]
        assert of_method == f"spec_bench, 480 questions{words}"
        assert of_hf == ("spec_bench, 480 questions" if own else of_method)


def test_executions_are_rows_of_their_own_other_benches_none_and_what_is_left_out_has_one(tmp_path):
    """A run on 3 of 8 questions of the sample bench had stood among the published rows as measured of Spec-Bench."""
    rehearsal = measured(pair("sample", 3, 8))
    assert (
        rehearsal["measured"].tolist() == ["rehearsal on sample, 3 of 8 questions, incomplete"] * 2
    )
    assert rehearsal["specbench_speedup"].tolist() == rehearsal["qa"].tolist() == [1.0, 2.0]
    assert len(measured(pair("sample", 3, 8) + pair("spec_bench", 8, 8))) == 2, (
        "none next to the paper's"
    )
    runs = [*pair("spec_bench", 3, 3), pair("spec_bench", 3, 3, execution="graph")[1]]
    assert measured(runs)["execution"].tolist() == ["transformers generate", "eager", "graph"]
    left_out = [
        {"model": "vicuna-7b", "bench": "a", "method": m, "why": "why"}
        for m in ("goose", "rest", "recycling")
    ]
    runs = pair("spec_bench", 8, 8)
    table = table1(Experiment(runs).table, left_out)
    assert table[table["source"] == "not available: why"]["name"].tolist() == ["REST", "goose"], (
        "below the paper's"
    )
    write_table1(Experiment(runs).table, tmp_path, left_out)
    latex = (tmp_path / "table1.tex").read_text()
    assert "\\caption{Columns 3 to 8 are speedups" in latex
    assert "\\\\\n\\cmidrule(lr){4-12} \\cmidrule(lr){13-15}\nModel & method" in latex
    starts = re.findall(r"\\midrule\n(\S+)", latex)
    assert starts == ["vicuna-7b", "vicuna-13b", "vicuna-33b"], "a rule above each model"
    lines = [
        line for line in latex.splitlines() if line.endswith("\\\\") and "multicolumn" not in line
    ]
    assert {line.count("&") for line in lines} == {14} and "Token Recycling & published" in latex
    assert (
        "vicuna-7b & REST & not available: why & -" in latex
        and "{c}{Spec-Bench} & \\multicolumn{3}{c}{MBPP}" in latex
    )


def test_any_name_is_a_row_of_latex_on_one_line(tmp_path):
    """Two lines moved the rules between models into a row, and what began with [ was the option of the row above."""
    odd = "[4ex] *\n\nnext_$A$ 100%\x1b\u202e\ud800"
    runs = pair(odd, 3, 3)
    for run in runs:
        run.metadata["settings"]["model"]["name"] = odd
    write_table1(Experiment(runs).table, tmp_path, footnotes=[odd])
    lines = (tmp_path / "table1.tex").read_text().splitlines()
    assert lines[0] == "% [4ex] * next_$A$ 100%\\u001b\\u202e?"
    start = lines.index("\\midrule") + 1
    escaped = r"[4ex] * next\_\$A\$ 100\%\textbackslash u001b\textbackslash u202e?"
    assert [line.count(escaped) for line in lines[start : start + 2]] == [2, 2]
    assert [line[:8] for line in lines[start : start + 3]] == ["{}[4ex] ", "{}[4ex] ", "\\midrule"]
