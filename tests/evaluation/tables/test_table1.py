"""The paper's Table 1 with measured rows: what each row is of, and what may stand among the published ones."""

import math
import re

import pandas as pd
import pytest

from evaluation.statistics.published import default_settings, read_published
from evaluation.tables.experiment import Experiment
from evaluation.tables.table1 import table1, write_table1
from tests.evaluation.made_runs import answer, made


def pair(bench, answered, questions, category="qa", method=None, start="hot", **more):
    """AR at a token a second and Token Recycling at two, with so many answers of so many questions.

    `method`: settings of Token Recycling that are not the published ones.
    """
    published = {"tree": "2.2.2", **default_settings("recycling"), **(method or {})}
    runs = []
    for label, lengths, own in (("hf", [1, 1], {}), (f"recycling ({start})", [2], published)):
        rows = [answer(i, category, [(lengths, float(len(lengths)))]) for i in range(answered)]
        model = {"name": "vicuna-7b", "dtype": "float16"}
        run = made(label, rows, questions=questions, bench={"name": bench}, model=model, method=own)
        run.metadata["settings"] |= {"max_new_tokens": 1024} | more
        runs.append(run)
    return runs


def measured(runs):
    table = table1(Experiment(runs).table)
    return table[table["source"] != "published"]


def test_published_rows_are_the_papers_and_ours_stand_below():
    runs = pair("spec_bench", 2, 480, category="writing") + pair("mbpp", 3, 399, category="code")
    table = table1(Experiment(runs).table)
    paper = pd.DataFrame(read_published("paper_table1")).set_index(["model", "method"])
    for bench, columns in (
        ("spec_bench", ["mt", "rag", "specbench_mat", "specbench_speedup"]),
        ("mbpp", ["mbpp_mat", "mbpp_speedup"]),
    ):
        published = table[(table["source"] == "published") & (table["bench"] == bench)]
        published = published.set_index(["model", "method"])[columns]
        pd.testing.assert_frame_equal(published, paper[columns].dropna())

    names = table[(table["model"] == "vicuna-7b") & (table["bench"] == "spec_bench")]["name"]
    paper_names = ["Lookahead", "PLD", "REST", "Medusa"]
    assert [*names] == ["AR", "Token Recycling", "AR", *paper_names, "Token Recycling"]
    rows = measured(runs).set_index(["bench", "method"])
    spec_bench, mbpp = (rows.loc[bench, "recycling (hot)"] for bench in ("spec_bench", "mbpp"))
    assert (spec_bench["mt"], spec_bench["specbench_speedup"], mbpp["mbpp_speedup"]) == (2, 2, 2)
    assert math.isnan(spec_bench["rag"])
    assert spec_bench["source"] == "2 of 480 questions, 1,024 new tokens, float16, a machine"
    assert mbpp["source"] == "3 of 399 questions, 1,024 new tokens, float16, a machine"


@pytest.mark.parametrize(
    ("more", "conditions", "settings"),
    [
        ({"max_new_tokens": 64}, "64 new tokens, float16", ""),
        (
            {"sampling": {"repetition_penalty": 1.3}},
            "1,024 new tokens, float16, repetition_penalty 1.3",
            "",
        ),
        ({"timed": False}, "1,024 new tokens, float16, timed False", ""),
        (
            {"method": {"k": 4, "tree": "best", "tree_nodes": 8}},
            "1,024 new tokens, float16",
            ", tree=best, k=4, 8 nodes",
        ),
        ({"method": {"tree_nodes": 80}}, "1,024 new tokens, float16", ""),
    ],
)
def test_a_row_names_what_differs_from_the_paper(more, conditions, settings):
    row = measured(pair("spec_bench", 480, 480, **more)).iloc[1]
    assert row["source"] == f"480 of 480 questions, {conditions}, a machine"
    assert row["name"] == f"Token Recycling{settings}"


def test_rows_are_of_most_questions_and_each_execution_and_start_has_its_own():
    runs = pair("spec_bench", 3, 3) + pair("spec_bench", 8, 8) + pair("sample", 9, 9)
    assert measured(runs)["questions"].tolist() == [8, 8]
    runs = [*pair("spec_bench", 3, 3), pair("spec_bench", 3, 3, execution="graph")[1]]
    runs += [pair("spec_bench", 3, 3, start="cold")[1]]
    names = ["AR", "Token Recycling", "Token Recycling (cold)", "Token Recycling, execution=graph"]
    assert sorted(measured(runs)["name"]) == names
    assert measured(pair("spec_bench", 3, 3, batch=4)).empty, "as the paper's"


def captions(runs, folder):
    write_table1(Experiment(runs).table, folder)
    return re.findall(r"\\caption{(.*)}\\label", (folder / "table1.tex").read_text())


def test_each_bench_has_its_table_and_captions_name_the_conditions(tmp_path):
    runs = pair("spec_bench", 8, 480) + pair("mbpp", 8, 399, category="code")
    spec_bench, mbpp = captions(runs, tmp_path)
    assert "Measured: 8 of 480 questions, 1,024 new tokens, float16, a machine." in spec_bench
    assert "Measured: 8 of 399 questions" in mbpp and "tree of 80 nodes" in mbpp
    short = pair("spec_bench", 8, 480, max_new_tokens=64)
    (several,) = captions([*pair("spec_bench", 8, 480), *short], tmp_path)
    for tokens in ("1,024", "64"):
        conditions = f"8 of 480 questions, {tokens} new tokens, float16, a machine"
        assert conditions in several
        assert f"vicuna-7b: {conditions}" in (tmp_path / "table1.tex").read_text()


def test_any_name_is_one_line_of_latex(tmp_path):
    odd = "next_$A$ 100%\n\x1b"
    table = Experiment(pair("spec_bench", 8, 8)).table
    write_table1(table, tmp_path, [odd])
    rows = pd.read_csv(tmp_path / "table1.csv")
    lines = (tmp_path / "table1.tex").read_text().splitlines()
    assert lines[0].startswith("% next_$A$ 100% ")
    cells = [line.count(" & ") for line in lines if " & " in line]
    assert cells == [9] * (1 + len(rows))
