r"""Tables for LaTeX, to be read by \input into a paper of two columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from model.errors import one_line

from ..statistics.intervals import FEWEST
from ..statistics.metrics import OVERALL
from . import notes
from .experiment import Experiment
from .rendering import cell, shown
from .tables import Column, blocks, column

HEAD = r"""% Needs \usepackage{booktabs,tabularx,xcolor}.
% Without intervals: \newcommand{\interval}[1]{} before \input.
\providecommand{\interval}[1]{\,{\scriptsize\textcolor{gray}{[#1]}}}
"""
TABLE = r"""\begin{%(environment)s}[t]
\centering\footnotesize\setlength{\tabcolsep}{4pt}
%(caption)s\smallskip
\begin{tabularx}{\linewidth}{@{}>{\raggedright\arraybackslash\hangindent=1em}X%(numbers)s@{}}
\toprule
%(lines)s
\bottomrule
\end{tabularx}
\end{%(environment)s}
"""
SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    }
)
MARKUP = re.compile(r"\\[a-z]+|[{}]")
NARROW = 24  # characters of a row's numbers, up to which a table is one column wide
ROWS = 40  # of a table: a float cannot break, so more rows are in another one
BOLD = f"Bold: the best of a block, of rows with at least {FEWEST} questions."

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
) -> str:
    """Return a `table`, or a `table*` if its numbers take more than NARROW characters.

    Names wrap in the width that the numbers leave. More than ROWS rows give several tables of one
    number.

    Args:
        parts: blocks by the title above them, with `name` and `questions`.
        columns: of numbers; NAME_low and NAME_high hold a column's interval.
    """
    texts = {}
    for title, frame in parts.items():
        by_heading = {escaped(about.heading): _cells(frame, about) for about in columns}
        texts[title] = pd.DataFrame(by_heading, index=list(frame["name"].map(escaped)))

    numbers = pd.concat(texts)
    printed = numbers.T.reset_index().replace(MARKUP, "", regex=True)  # a column a row
    width = printed.map(len).max(axis="columns").sum() + 2 * len(columns)
    about = {
        "environment": "table" if width <= NARROW else "table*",
        "numbers": "r" * len(columns),
        "caption": rf"\caption{{{escaped(f'{caption} {BOLD}')}}}\label{{{label}}}",
    }
    text = HEAD
    for _, page in numbers.groupby(np.arange(len(numbers)) // ROWS):
        lines = [" & ".join(["", *numbers]) + r" \\"]
        for words, rows in page.groupby(level=0, sort=False):
            above = rf"{{\raggedright\itshape {escaped(str(words))}}} \\"
            span = rf"\multicolumn{{{1 + len(columns)}}}{{@{{}}p{{\linewidth}}@{{}}}}"
            lines += [r"\midrule", span + above]
            cells = rows.droplevel(0).reset_index().to_numpy()
            lines += [" & ".join(row) + r" \\" for row in cells]
        text += TABLE % (about | {"lines": "\n".join(lines)})
        about["caption"] = r"\addtocounter{table}{-1}\caption{(continued)}"
    return text


def _cells(frame: pd.DataFrame, about: Column) -> list[str]:
    enough = frame["questions"] >= FEWEST
    rivals = pd.to_numeric(frame[about.name]).where(enough)
    best = shown(rivals.max(), about.form) if rivals.count() > 1 else ""
    cells = [cell(row, about.name) for row in frame.to_dict("records")]
    widest = max((number.interval for number in cells), key=len)
    space = rf"\phantom{{\interval{{{widest[1:-1]}}}}}" if widest else ""

    texts = []
    for number, is_rival in zip(cells, enough, strict=True):
        is_best = is_rival and number.text == best
        text = rf"\textbf{{{best}}}" if is_best else number.text.replace("-", "--")
        interval = rf"\interval{{{number.interval[1:-1]}}}" if number.interval else space
        texts.append(text + interval)
    return texts


def escaped(text: str) -> str:
    """Return the text with LaTeX's special characters escaped, in one line."""
    return one_line(text).translate(SPECIAL)


def main_latex(experiment: Experiment) -> str:
    """Return the main table over all questions."""
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
