r"""Tables for LaTeX, to be read by \input into a paper of two columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from model.errors import one_line

from ..statistics.intervals import FEWEST
from ..statistics.metrics import OVERALL
from . import notes
from .experiment import Experiment
from .rendering import shown
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
BOLD = f"Bold: the best on a device, of rows with at least {FEWEST} questions."

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
        parts: rows by the title above them, with `name`, `device` and `questions`.
        columns: of numbers; NAME_low and NAME_high hold a column's interval.
    """
    cells = {}
    for title, frame in parts.items():
        by_heading = {escaped(about.heading): _cells(frame, about) for about in columns}
        cells[title] = pd.DataFrame(by_heading, index=list(frame["name"].map(escaped)))

    numbers = pd.concat(cells.values())
    widest = [_width(str(heading), *texts) for heading, texts in numbers.items()]
    about = {
        "environment": "table" if sum(widest) <= NARROW else "table*",
        "numbers": "r" * len(columns),
        "caption": rf"\caption{{{escaped(f'{caption} {BOLD}')}}}\label{{{label}}}",
    }
    text = HEAD
    for page in _pages(cells):
        lines = [" & ".join(["", *numbers]) + r" \\"]
        for title, rows in page.items():
            lines += [r"\midrule", _spanning(title, 1 + len(columns))]
            lines += [" & ".join(row) + r" \\" for row in rows.itertuples(name=None)]
        text += TABLE % (about | {"lines": "\n".join(lines)})
        about["caption"] = "\\addtocounter{table}{-1}\\caption{(continued)}"
    return text


def _width(*texts: str) -> int:
    """Return the characters of a column, with the space before it."""
    return 2 + max(len(MARKUP.sub("", text)) for text in texts)


def _pages(parts: Mapping[str, pd.DataFrame]) -> list[dict[str, pd.DataFrame]]:
    """Cut the parts into tables of at most ROWS rows."""
    pages: list[dict[str, pd.DataFrame]] = [{}]
    room = ROWS
    for title, rows in parts.items():
        for start in range(0, len(rows), ROWS):
            piece = rows[start : start + ROWS]
            if len(piece) > room:
                pages.append({})
                room = ROWS
            pages[-1][title] = piece
            room -= len(piece)
    return pages


def _spanning(title: str, columns: int) -> str:
    """Return a line of one cell, as wide as the table."""
    cell = rf"\raggedright\itshape {escaped(title)}"
    return rf"\multicolumn{{{columns}}}{{@{{}}p{{\linewidth}}@{{}}}}{{{cell}}} \\"


def _cells(frame: pd.DataFrame, about: Column) -> list[str]:
    """Return a column's numbers with their intervals."""
    numbers = pd.to_numeric(frame[about.name])
    rivals = numbers.where(frame["questions"] >= FEWEST).groupby(frame["device"])
    best = rivals.transform("max").where(rivals.transform("count") > 1)
    texts = []
    intervals = []
    for row, highest in zip(frame.to_dict("records"), best, strict=True):
        text = shown(row[about.name], about.form).replace("-", "--")
        is_best = row["questions"] >= FEWEST and text == shown(highest, about.form)
        texts.append(rf"\textbf{{{text}}}" if is_best else text)
        low = shown(row.get(f"{about.name}_low"), about.form)
        high = shown(row.get(f"{about.name}_high"), about.form)
        intervals.append("" if low == high else rf"\interval{{{low}, {high}}}")

    space = max(intervals, key=len, default="")  # so that numbers are below one another
    return [
        text + (interval or rf"\phantom{{{space}}}" * bool(space))
        for text, interval in zip(texts, intervals, strict=True)
    ]


def escaped(text: str) -> str:
    """Return the text with LaTeX's special characters escaped, in one line."""
    return one_line(text).translate(SPECIAL)


def main_latex(experiment: Experiment) -> str:
    """Return the main table over all questions, a part for each model and bench."""
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
