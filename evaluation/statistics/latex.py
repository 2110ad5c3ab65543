r"""Tables for LaTeX, in booktabs' style, to be read by \input into a paper of two columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from model.errors import one_line

from . import notes
from .experiment import Experiment
from .metrics import OVERALL
from .rendering import shown
from .tables import Column, blocks, column

HEAD = r"""% Needs \usepackage{booktabs} and \usepackage{xcolor}.
% Without intervals: \newcommand{\interval}[1]{} before \input.
\providecommand{\interval}[1]{\,{\tiny\textcolor{gray}{[#1]}}}
"""
SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    }
)


# the main table's columns of numbers, by their titles in a paper
MAIN = {
    "mat": "MAT",
    "tokens_per_second": "Tokens/s",
    "speedup_hf": "over generate",
    "speedup_vanilla": "over no drafts",
}


def latex_table(
    parts: Mapping[str, pd.DataFrame],
    columns: Sequence[Column],
    *,
    caption: str,
    label: str,
    above: Sequence[str] = (),
) -> str:
    """Return a `table*`.

    Args:
        parts: blocks by the words of their spanning lines; a row's `name` is its first cell, the
            first row the baseline. The best number of a column is bold.
        columns: of numbers, by their headings; NAME_low and NAME_high hold a column's interval.
        above: lines of comments.
    """
    spans = "".join(f"% {one_line(line)}\n" for line in above)
    alignment = "l" + "r" * len(columns)
    titles = " & ".join(["Method", *(escaped(about.heading) for about in columns)])
    lines = [
        r"\begin{table*}[t]",
        r"\centering\small",
        rf"\caption{{{escaped(caption)}}}",
        rf"\label{{{label}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        rf"{titles} \\",
    ]
    for words, frame in parts.items():
        lines.append(r"\midrule")
        lines.append(rf"\multicolumn{{{len(alignment)}}}{{l}}{{\textit{{{escaped(words)}}}}} \\")
        best = {}
        for about in columns:
            values = pd.to_numeric(frame[about.name]).dropna()
            best[about.name] = ""
            if len(values) > 1:
                best[about.name] = shown(values.max(), about.form)

        for row in frame.to_dict("records"):
            cells = [_cell(row, about, best[about.name]) for about in columns]
            name = escaped(str(row["name"]))
            lines.append(" & ".join([name, *cells]) + r" \\")

    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table*}"]
    return spans + HEAD + "\n".join(lines) + "\n"


def _cell(row: dict[Any, Any], about: Column, best: str) -> str:
    """Return a number, bold if it is the best as printed, and its interval."""
    name = about.name
    if pd.isna(row[name]):
        return "--"

    text = shown(row[name], about.form)
    if text == best:
        text = rf"\textbf{{{text}}}"
    low = shown(row.get(f"{name}_low"), about.form)
    high = shown(row.get(f"{name}_high"), about.form)
    return text if low == high else rf"{text}\interval{{{low}, {high}}}"


def escaped(text: str) -> str:
    """Return the text with LaTeX's special characters escaped, in one line."""
    return one_line(text).translate(SPECIAL)


def main_latex(experiment: Experiment) -> str:
    """Return the main table over all questions, a block for each model and bench."""
    table = experiment.table
    overall = blocks(table[table["category"] == OVERALL])
    named = {}
    for words, rows in overall.items():
        variants = rows["variant"].fillna("") if "variant" in rows else ""
        names = (rows["method"] + ", " + variants).str.removesuffix(", ")
        title = f"{words} ({rows['questions'].max()} questions)"
        named[title] = rows.assign(name=names)

    columns = []
    for name, title in MAIN.items():
        if name in table and table[name].notna().any():
            columns.append(replace(column(name), title=title))

    caption = "MAT: tokens per step, the bonus token included. Tokens/s: mean over questions. "
    caption += ". ".join(notes.heading(experiment.runs)) + "."
    return latex_table(named, columns, caption=caption, label="tab:main")
