r"""Tables for LaTeX, in booktabs' style, to be read by \input into a paper of two columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

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


def latex_table(
    blocks: Mapping[str, pd.DataFrame],
    figures: Sequence[Figure],
    *,
    caption: str,
    label: str,
    above: Sequence[str] = (),
) -> str:
    """Return a `table*`.

    Args:
        blocks: by the words of their spanning lines; a row's `name` is its first cell. The first
            row is the baseline. The best figure of a column is bold.
        above: lines of comments.
    """
    spans = "".join(f"% {line}\n" for line in above)
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
    for words, frame in blocks.items():
        lines.append(r"\midrule")
        lines.append(rf"\multicolumn{{{len(columns)}}}{{l}}{{\textit{{{escaped(words)}}}}} \\")
        best = {figure.name: _rounded(frame[figure.name].max(), figure) for figure in figures}
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
    low = row.get(f"{figure.name}_low", math.nan)
    if pd.isna(low):
        return text
    high = row[f"{figure.name}_high"]
    return rf"{text}\interval{{{_rounded(low, figure)}, {_rounded(high, figure)}}}"


def escaped(text: str) -> str:
    """Return the text with LaTeX's special characters escaped, in one line."""
    return " ".join(text.split()).translate(SPECIAL)
