r"""Tables for LaTeX, in booktabs' style, to be read by \input into a paper of two columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from model.errors import one_line

from . import notes
from .experiment import Experiment
from .metrics import OVERALL
from .tables import blocks

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


class Figure(NamedTuple):
    """A column of numbers."""

    name: str  # of the frame's column; NAME_low and NAME_high hold its interval, if there are any
    title: str
    digits: int = 2


MAIN = (
    Figure("mat", "MAT"),
    Figure("tokens_per_second", "Tokens/s", 1),
    Figure("speedup_hf", "over generate"),
    Figure("speedup_vanilla", "over no drafts"),
)


def latex_table(
    parts: Mapping[str, pd.DataFrame],
    figures: Sequence[Figure],
    *,
    caption: str,
    label: str,
    above: Sequence[str] = (),
) -> str:
    """Return a `table*`.

    Args:
        parts: blocks by the words of their spanning lines; a row's `name` is its first cell, the
            first row the baseline. The best figure of a column is bold.
        above: lines of comments.
    """
    spans = "".join(f"% {one_line(line)}\n" for line in above)
    columns = "l" + "r" * len(figures)
    titles = " & ".join(["Method", *(escaped(figure.title) for figure in figures)])
    lines = [
        r"\begin{table*}[t]",
        r"\centering\small",
        rf"\caption{{{escaped(caption)}}}",
        rf"\label{{{label}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        rf"{titles} \\",
    ]
    for words, frame in parts.items():
        lines.append(r"\midrule")
        lines.append(rf"\multicolumn{{{len(columns)}}}{{l}}{{\textit{{{escaped(words)}}}}} \\")
        best = {}
        for figure in figures:
            values = pd.to_numeric(frame[figure.name]).dropna()
            best[figure.name] = _rounded(values.max(), figure) if len(values) > 1 else ""

        for row in frame.to_dict("records"):
            cells = [_cell(row, figure, best[figure.name]) for figure in figures]
            lines.append(" & ".join([escaped(str(row["name"])), *cells]) + r" \\")

    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table*}"]
    return spans + HEAD + "\n".join(lines) + "\n"


def _rounded(value: Any, figure: Figure) -> str:
    return "--" if pd.isna(value) else f"{value:,.{figure.digits}f}"


def _cell(row: dict[Any, Any], figure: Figure, best: str) -> str:
    """Return a number, bold if it is the best as printed, and its interval."""
    text = _rounded(row[figure.name], figure)
    if text == "--":
        return text

    if text == best:
        text = rf"\textbf{{{text}}}"
    ends = (row.get(f"{figure.name}_{end}", math.nan) for end in ("low", "high"))
    low, high = (_rounded(end, figure) for end in ends)
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
        named[f"{words} ({rows['questions'].max()} questions)"] = rows.assign(name=names)

    figures = [
        figure for figure in MAIN if figure.name in table and table[figure.name].notna().any()
    ]
    caption = "MAT: tokens per step, the bonus token included. Tokens/s: mean over questions. "
    caption += ". ".join(notes.heading(experiment.runs)) + "."
    return latex_table(named, figures, caption=caption, label="tab:main")
