"""LaTeX tables: what is printed, and that LaTeX reads them where one is installed."""

import shutil
import subprocess

import pandas as pd
import pytest

from evaluation.tables.latex import latex_table
from evaluation.tables.tables import Column, column

FRAME = pd.DataFrame(
    {
        "name": ["hf", "a_b (hot) 50 %"],
        "mat": [1.0, 2.345],
        "mat_low": [float("nan"), 2.2],
        "mat_high": [float("nan"), 2.5],
        "tokens_per_second": [1234.56, float("nan")],
    }
)
COLUMNS = [Column("mat", title="MAT"), column("tokens_per_second")]
TABLE = latex_table(
    {"model_x, bench #1": FRAME}, COLUMNS, caption="100 % of {it}", label="tab:main"
)


def test_best_is_bold_intervals_are_small_and_special_characters_are_escaped():
    lines = TABLE.splitlines()
    assert r"model\_x, bench \#1 & hf & 1.00 & 1,234.6 \\" in lines
    assert r" & a\_b (hot) 50 \% & \textbf{2.35}\interval{2.20, 2.50} & -- \\" in lines
    assert r"\caption{100 \% of \{it\}}" in lines and r"\begin{tabular}{llrr}" in lines
    assert TABLE.count("{") == TABLE.count("}")


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no LaTeX")
def test_latex_reads_it_with_and_without_intervals(tmp_path):
    (tmp_path / "main.tex").write_text(TABLE)
    for switch in ("", r"\newcommand{\interval}[1]{}"):
        paper = rf"\documentclass{{article}}\usepackage{{booktabs,xcolor}}{switch}"
        paper += r"\begin{document}\input{main.tex}\end{document}"
        (tmp_path / "paper.tex").write_text(paper)
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
