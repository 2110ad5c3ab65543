"""LaTeX tables: what is printed, and that LaTeX reads them where one is installed."""

import re
import shutil
import subprocess

import pandas as pd
import pytest

from evaluation.tables.latex import ROWS, latex_table
from evaluation.tables.tables import Column, column

FRAME = pd.DataFrame(
    {
        "name": ["hf", "a_b (hot) 50 %"],
        "questions": 8,
        "mat": [1.0, 2.345],
        "mat_low": [float("nan"), 2.2],
        "mat_high": [float("nan"), 2.5],
        "tokens_per_second": [1234.56, float("nan")],
    }
)
COLUMNS = [Column("mat", title="MAT"), column("tokens_per_second")]


def latex(*frames, columns=COLUMNS):
    parts = {f"model_{number}, bench #1": frame for number, frame in enumerate(frames)}
    return latex_table(parts, columns, caption="100 % of {it}", label="tab:main")


LONG = pd.concat([FRAME] * 30, ignore_index=True)
TABLE = latex(LONG, FRAME)


def test_best_is_bold_intervals_are_small_and_special_characters_are_escaped():
    lines = latex(FRAME).splitlines()
    title = r"{\raggedright\itshape model\_0, bench \#1} \\"
    assert rf"\multicolumn{{3}}{{@{{}}p{{\linewidth}}@{{}}}}{title}" in lines
    assert r"hf & 1.00\phantom{\interval{2.20, 2.50}} & 1,234.6 \\" in lines
    assert r"a\_b (hot) 50 \% & \textbf{2.35}\interval{2.20, 2.50} & -- \\" in lines
    assert r"\caption{100 \% of \{it\} Bold: " in latex(FRAME)
    assert TABLE.count("{") == TABLE.count("}")


def test_no_number_of_fewer_than_eight_questions_is_bold():
    few = FRAME.assign(mat=[3.0, 2.5], questions=[7, 8])
    others = FRAME.assign(mat=[2.0, 1.0])
    bold = re.findall(r"textbf{(.*?)}", latex(pd.concat([few, others])))
    assert bold == ["2.50"], "the second best, as the best is of seven questions"
    assert re.findall(r"textbf{(.*?)}", latex(few, others)) == ["2.00"], "by block"


def test_a_table_is_as_wide_as_its_numbers_need_and_cut_at_a_page():
    assert r"\begin{table}[t]" in latex(FRAME, columns=COLUMNS[:1])
    assert r"\begin{table*}[t]" in latex(FRAME)
    tables = TABLE.split(r"\begin{table*}")[1:]
    rows = [len(re.findall("^(hf|a)", table, flags=re.MULTILINE)) for table in tables]
    assert rows == [ROWS, 60 - ROWS + 2] and all(table.count("model") for table in tables)
    assert TABLE.count(r"\label") == TABLE.count(r"\addtocounter{table}{-1}") == 1


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no LaTeX")
def test_latex_sets_it_within_its_columns_with_and_without_intervals(tmp_path):
    named = FRAME.assign(name="a very long name of a method " * 9)
    (tmp_path / "main.tex").write_text(TABLE + latex(named) + latex(named, columns=COLUMNS[:1]))
    for switch in ("", r"\newcommand{\interval}[1]{}"):
        paper = r"\documentclass[twocolumn]{article}\usepackage{booktabs,tabularx,xcolor}"
        paper += rf"{switch}\begin{{document}}\input{{main.tex}}\end{{document}}"
        (tmp_path / "paper.tex").write_text(paper)
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        log = (tmp_path / "paper.log").read_text(errors="replace")
        assert not re.findall(r"Overfull|too large", log)
