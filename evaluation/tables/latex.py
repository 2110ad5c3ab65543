r"""Tables for LaTeX, in booktabs' style, to be read by \input into a paper of two columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from model.errors import one_line

from ..statistics.metrics import OVERALL
from . import notes
from .experiment import Experiment
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
        parts: blocks by their titles, which are in a column if there are several; a row's `name`
            is its first cell. The best number of a column is bold.
        columns: of numbers, by their headings; NAME_low and NAME_high hold a column's interval.
        above: lines of comments.
    """
    by_title = {}
    for words, frame in parts.items():
        cells = {escaped(about.heading): _cells(frame, about) for about in columns}
        by_title[escaped(words)] = pd.DataFrame(cells, index=list(frame["name"].map(escaped)))
    body = pd.concat(by_title).style.to_latex(
        column_format="ll" + "r" * len(columns),
        environment="table*",
        position="t",
        position_float="centering",
        hrules=True,
        multirow_align="naive",
        caption=escaped(caption),
        label=label,
    )
    comments = "".join(f"% {one_line(line)}\n" for line in above)
    return comments + HEAD + body


def _cells(frame: pd.DataFrame, about: Column) -> list[str]:
    """Return a column's numbers with their intervals, the best as printed in bold."""
    numbers = pd.to_numeric(frame[about.name])
    best = shown(numbers.max(), about.form) if numbers.count() > 1 else ""
    cells = []
    for row in frame.to_dict("records"):
        value: Any = row[about.name]
        text = "--" if pd.isna(value) else shown(value, about.form)
        low = shown(row.get(f"{about.name}_low"), about.form)
        high = shown(row.get(f"{about.name}_high"), about.form)
        interval = "" if low == high else rf"\interval{{{low}, {high}}}"
        cells.append((rf"\textbf{{{text}}}" if text == best else text) + interval)
    return cells


def escaped(text: str) -> str:
    """Return the text with LaTeX's special characters escaped, in one line."""
    return one_line(text).translate(SPECIAL)


def main_latex(experiment: Experiment) -> str:
    """Return the main table over all questions, a block for each model and bench."""
    table = experiment.table
    overall = blocks(table[table["category"] == OVERALL])
    named = {}
    for words, rows in overall.items():
        names = (rows["method"] + ", " + rows["variant"].fillna("")).str.removesuffix(", ")
        title = f"{words} ({rows['questions'].max()} questions)"
        named[title] = rows.assign(name=names)

    columns = []
    for name, title in MAIN.items():
        if name in table and table[name].notna().any():
            columns.append(replace(column(name), title=title))

    caption = "MAT: tokens per step, the bonus token included. Tokens/s: mean over questions. "
    caption += ". ".join(notes.heading(experiment.runs)) + "."
    return latex_table(named, columns, caption=caption, label="tab:main")
