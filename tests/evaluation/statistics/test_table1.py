"""The paper's Table 1 with measured rows: what each row is of, and what may stand among the published ones."""

import math

import pandas as pd
import pytest

from evaluation.statistics.published import read_published, table1
from evaluation.statistics.rendering import write_table1
from tests.evaluation.made_runs import answer, asked, made, shard
from tests.evaluation.statistics.test_tables import METHOD, VANILLA


def test_table1_has_the_published_rows_and_ours_beside():
    rest = [answer(i, "code", [([2, 2], 1.0)]) for i in (9, 10)]
    base = [answer(1, "qa", [([1] * 4, 4.0)]), answer(2, "writing", [([1] * 4, 2.0)])]
    fast = [answer(1, "qa", [([2, 2], 2.0)]), answer(2, "writing", [([4], 1.0)])]
    runs = [made("hf", [*base, *rest]), made("recycling (hot)", [*fast, *rest])]
    table = table1(runs)
    published = table[table["source"] == "published"].reset_index(drop=True)
    for theirs in read_published("paper_table1"):
        own = published[(published["model"] == theirs["model"]) & (published["method"] == theirs["method"])].iloc[0]
        for column in ("mt", "rag", "specbench_mat", "specbench_speedup", "mbpp_speedup"):
            assert own[column] == theirs[column] or (own[column] != own[column] and theirs[column] != theirs[column])
    block = published[published["model"] == "vicuna-7b"]["name"].tolist()
    assert block == ["AR", "Lookahead", "PLD", "REST", "Medusa", "Token Recycling"]
    ours = table[(table["model"] == "toy") & (table["name"] == "Token Recycling")].iloc[0]
    assert (ours["qa"], ours["mt"], ours["specbench_speedup"]) == (2.0, 2.0, 2.0)
    assert ours["specbench_mat"] == 8 / 3 and ours["specbench_tokens_per_second"] == 3.0
    assert ours["mbpp_mat"] == 2.0 and ours["mbpp_speedup"] == 1.0 and math.isnan(ours["rag"])


def test_table1_keeps_the_run_of_most_questions():
    """A part of the bench had replaced the whole, as 60 sorts behind 480."""

    def runs_of(ids, seconds):
        bench = {"name": "spec_bench"}
        base = shard("hf", [asked(i, "qa", [([1] * 4, 4.0)]) for i in ids], bench=bench)
        return [base, shard("recycling (hot)", [asked(i, "qa", [([2, 2], seconds)]) for i in ids], bench=bench)]

    code = [asked(i, "code", [([2, 2], 1.0)]) for i in range(3)]
    mbpp = shard("recycling (hot)", code, bench={"name": "mbpp", "sha256": "m"})
    for runs in (
        runs_of(range(480), 2.0) + runs_of(range(60), 1.0),
        runs_of(range(60), 1.0) + runs_of(range(480), 2.0),
    ):
        table = table1([*runs, mbpp])
        ours = table[(table["source"] == "measured") & (table["method"] == "recycling")]
        assert ours["name"].tolist() == ["Token Recycling", "Token Recycling, 60 questions"]
        assert ours["specbench_speedup"].tolist() == [2.0, 4.0] and ours["qa"].tolist() == [2.0, 4.0]
        assert ours["mbpp_mat"].iloc[0] == 2.0 and math.isnan(ours["mbpp_mat"].iloc[1])


def test_table1_on_paper(tmp_path):
    runs = [made("hf", VANILLA[0].answers), made("recycling (cold)", METHOD[0].answers, method={"start": "cold"})]
    write_table1(runs, tmp_path)
    latex = (tmp_path / "table1.tex").read_text()
    lines = [line for line in latex.splitlines() if line.endswith("\\\\") and "multicolumn" not in line]
    assert {line.count("&") for line in lines} == {13} and latex.count("\\midrule") == 4
    assert "\\textit{2.03$\\times$}" in latex and "Token Recycling (cold)" in latex
    assert "| Token Recycling | published | 2.17 |" in (tmp_path / "table1.md").read_text()


def pair(bench, answered, questions, model="vicuna-7b", category="qa", base=None, **more):
    """AR at a token a second and Token Recycling at two, with so many answers of so many questions."""
    found = []
    for label, lengths, count in (("hf", [1, 1], base or answered), ("recycling (hot)", [2], answered)):
        seconds = 2.0 if label == "hf" else 1.0
        rows = [answer(i, category, [(lengths, seconds)]) for i in range(count)]
        run = made(label, rows, questions=questions, bench={"name": bench}, model={"name": model, "dtype": "float16"})
        run.metadata["settings"] |= {"max_new_tokens": 1024} | more
        found.append(run)
    return found


PLACES = ("table1.csv", "table1.md", "table1.tex")


def written(runs, folder):
    write_table1(runs, folder)
    return [(folder / name).read_text().replace("\\_", "_") for name in PLACES]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (pair("spec_bench", 480, 480), "spec_bench, 480 questions"),
        (pair("spec_bench", 3, 480), "spec_bench, 3 of 480 questions, incomplete"),
        (pair("spec_bench", 60, 60), "spec_bench, 60 questions of its 480"),
        (pair("mbpp", 3, 60, category="code"), "mbpp, 3 of 60 questions of its 399, incomplete"),
        (pair("sample", 8, 8), "sample, 8 questions"),
        (pair("sample", 3, 8), "sample, 3 of 8 questions, incomplete"),
        (pair("poems", 2, 2, category="poetry"), "poems, 2 questions"),
        (pair("spec_bench", 4, 480, base=2), "incomplete; speedups over the 2 of them that AR has answered"),
        (pair("spec_bench", 480, 480, max_new_tokens=64), "spec_bench, 480 questions; max_new_tokens 64"),
    ],
)
def test_a_measured_row_says_of_what_it_is(tmp_path, runs, said):
    table = table1(runs)
    ours = table[table["source"] == "measured"]
    assert len(ours) == 2 and said in ours["measured"].iloc[1]
    assert ours["complete"].tolist() == ["incomplete" not in said] * 2
    assert ours["execution"].tolist() == ["transformers generate", "eager"]
    csv, md, tex = written(runs, tmp_path)
    assert said in csv and f"{said}; eager |" in md and f"{said}; eager)" in tex
    (line,) = [line for line in md.splitlines() if line.startswith("| Token Recycling | measured: ")]
    assert f"{said}; eager |" in line


def test_other_benches_stand_apart(tmp_path):
    """A run on 3 of 8 questions of the sample bench had stood among the published rows as measured of Spec-Bench."""
    runs = [*pair("sample", 3, 8), *pair("spec_bench", 480, 480), *pair("mbpp", 399, 399, category="code")]
    table = table1(runs)
    assert table[table["other_bench"] == "sample"]["source"].tolist() == ["measured"] * 2
    assert table["other_bench"].tolist()[-2:] == ["sample"] * 2 and set(table["other_bench"][:-2]) == {""}
    ours = table[(table["other_bench"] == "") & (table["source"] == "measured")]
    _, whole = ours.to_dict("records")
    assert whole["measured"] == "spec_bench, 480 questions; mbpp, 399 questions" and whole["complete"]
    assert (whole["specbench_questions"], whole["mbpp_questions"]) == (480, 399)
    _, md, tex = written(runs, tmp_path)
    blocks = md.split("\n## ")[1:]
    assert [block.splitlines()[0] for block in blocks] == [
        *("vicuna-7b (measured on a machine)", "vicuna-13b", "vicuna-33b"),
        "vicuna-7b on sample (measured on a machine)",
    ]
    assert "published" in blocks[0] and "sample" not in "".join(blocks[:3])
    assert "not comparable with the published figures" in blocks[3] and "| published |" not in blocks[3]
    first, second = tex.split("\\end{tabular}")[:2]
    assert "sample" not in first and "\\textit" in first and "{Spec-Bench}" in first
    assert "{sample (not comparable" in second and "\\textit" not in second and "Spec-Bench" not in second


def test_what_is_left_out_stands_where_its_model_does():
    left_out = [{"model": model, "bench": "sample", "method": "rest", "why": "why"} for model in ("vicuna-7b", "toy")]
    table = table1(pair("sample", 8, 8, model="toy"), left_out).set_index(["model", "method"])
    assert table.loc[("vicuna-7b", "rest"), "other_bench"].tolist() == ["", ""], "beside the published row"
    assert table.loc[("toy", "rest"), "other_bench"] == "sample"


def test_executions_are_rows_of_their_own():
    runs = pair("spec_bench", 3, 3)
    compiled = pair("spec_bench", 3, 3)[1]
    compiled.metadata["settings"]["execution"] = "compiled"
    table = table1([*runs, compiled])
    ours = table[(table["source"] == "measured") & (table["method"] == "recycling")]
    assert ours["execution"].tolist() == ["eager", "compiled"]


def test_the_table_is_read_back_as_it_was(tmp_path):
    runs = pair("sample", 3, 8)
    write_table1(runs, tmp_path)
    again = pd.read_csv(tmp_path / "table1.csv")
    assert again["complete"].dropna().tolist() == [False, False] and again["specbench_mat"].tolist()[-2:] == [1.0, 2.0]
