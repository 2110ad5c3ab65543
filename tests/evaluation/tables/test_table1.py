"""The paper's Table 1 with measured rows: what each row is of, and what may stand among the published ones."""

import math

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
    return table[table["source"].str.startswith("measured; ")]


def test_published_rows_are_the_papers_and_ours_stand_below():
    runs = pair("spec_bench", 2, 480, category="writing") + pair("mbpp", 3, 399, category="code")
    table = table1(Experiment(runs).table)
    published = table[table["source"] == "published"].set_index(["model", "method"])
    paper = pd.DataFrame(read_published("paper_table1")).set_index(["model", "method"])
    columns = ["mt", "rag", "specbench_mat", "specbench_speedup", "mbpp_speedup"]
    pd.testing.assert_frame_equal(published.loc[paper.index, columns], paper[columns])

    names = table[table["model"] == "vicuna-7b"]["name"].tolist()
    paper_names = ["Lookahead", "PLD", "REST", "Medusa"]
    assert names == ["AR", "AR", *paper_names, "Token Recycling", "Token Recycling"]
    _, ours = measured(runs).to_dict("records")
    assert (ours["mt"], ours["specbench_speedup"], ours["mbpp_speedup"]) == (2.0, 2.0, 2.0)
    assert math.isnan(ours["rag"])
    of_spec_bench = "spec_bench, 2 of 480 questions, float16"
    of_mbpp = "mbpp, 3 of 399 questions, float16"
    assert f"; {of_spec_bench}; " in ours["source"] and f"; {of_mbpp}; " in ours["source"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_new_tokens": 64}, ", max_new_tokens 64"),
        ({"sampling": {"repetition_penalty": 1.3}}, ", repetition_penalty 1.3"),
        ({"timed": False}, ", timed False"),
        ({"method": {"k": 4, "tree": "best"}}, ", tree best, k 4"),
    ],
)
def test_a_row_names_what_differs_from_the_paper(more, words):
    row = measured(pair("spec_bench", 480, 480, **more)).iloc[1]
    assert f"spec_bench, 480 of 480 questions, float16{words}; eager;" in row["source"]


def test_rows_are_of_most_questions_and_each_execution_and_start_has_its_own():
    runs = pair("spec_bench", 3, 3) + pair("spec_bench", 8, 8) + pair("sample", 9, 9)
    assert measured(runs)["source"].str.contains("8 of 480").tolist() == [True, True]
    runs = [*pair("spec_bench", 3, 3), pair("spec_bench", 3, 3, execution="graph")[1]]
    runs += [pair("spec_bench", 3, 3, start="cold")[1]]
    rows = measured(runs)
    executions = rows["source"].str.split("; ").str[-2].tolist()
    assert sorted(executions) == ["eager", "eager", "graph", "transformers generate"]
    assert "Token Recycling (cold)" in rows["name"].tolist()
    assert measured(pair("spec_bench", 3, 3, batch=4)).empty, "as the paper's"


def test_any_name_is_one_line_of_latex(tmp_path):
    odd = "next_$A$ 100%\n\x1b"
    table = Experiment(pair("spec_bench", 8, 8)).table
    write_table1(table, tmp_path, [odd])
    rows = pd.read_csv(tmp_path / "table1.csv")
    lines = (tmp_path / "table1.tex").read_text().splitlines()
    assert lines[0].startswith("% next_$A$ 100% ")
    cells = [line.count(" & ") for line in lines if " & " in line]
    assert cells == [13] * (1 + len(rows))


def test_eager_steps_next_to_fast_ones_are_named_as_published():
    fast = pair("spec_bench", 2, 480, execution="graph")
    eager = pair("spec_bench", 2, 480, execution="eager")[1:]
    names = [*measured([*fast, *eager])["name"]]
    assert [name for name in names if name.endswith(", eager steps as published")]
    assert any("eager" not in name for name in names if name.startswith("Token"))
