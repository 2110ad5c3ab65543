"""A table as people see it: cells made once from the rows, rendered for terminal, Markdown and LaTeX, and by the page.

CSV holds the rows with every digit.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from model.files import write_text

from ..records.runs import Run
from ..records.sweeps import not_available
from . import notes
from .acceptance import depths_table, nodes_table
from .columns import COLUMNS, MARKDOWN, PAGE, SETUP, TABLE1, TERMINAL, Column, column
from .intervals import spans_one
from .metrics import OVERALL
from .notes import UNSURE
from .pools import pools
from .published import MEASURED, PUBLISHED, PUBLISHED_EXECUTION, table1, with_published
from .tables import BASELINES, blocks, main_table, memory_table, with_unavailable


class Heading(NamedTuple):
    """The head of a column: `extra` ones are hidden on the page until asked for, `meaning` is their definition."""

    name: str
    title: str
    number: bool = True
    extra: bool = False
    meaning: str = ""


class Cell(NamedTuple):
    """A value as printed.

    Attributes:
        interval: its 95 % interval as printed, where known.
        mark: of the footnote that it needs: `~` if the interval of a speedup spans 1.
        value: what to sort by; empty if there is none.
    """

    text: str
    interval: str = ""
    mark: str = ""
    value: str = ""

    @property
    def printed(self) -> str:
        """The value with its mark, and its interval behind it."""
        return " ".join(filter(None, (self.text + self.mark, self.interval)))


class Line(NamedTuple):
    """A row: its cells in the order of the columns, and what it is filtered by."""

    cells: list[Cell]
    method: str
    category: str = ""


@dataclass(frozen=True)
class Block:
    """A part of a table with columns of its own, and its title."""

    columns: list[Heading]
    lines: list[Line]
    title: str = ""

    @property
    def configurations(self) -> list[list[Line]]:
        """The lines of each configuration, the overall one first, then its subtasks."""
        ends = [i for i, line in enumerate(self.lines, start=1) if line.category == OVERALL]
        return [[self.lines[e - 1], *self.lines[b : e - 1]] for b, e in zip([0, *ends], ends, strict=False)]

    @property
    def baselines(self) -> list[str]:
        """The baselines over which it has speedups."""
        return [name for name in BASELINES if any(column.name == f"speedup_{name}" for column in self.columns)]


@dataclass(frozen=True)
class View:
    """A table: paragraphs above it, its blocks, footnotes; `same` are the settings that all rows share."""

    blocks: list[Block]
    title: str = ""
    head: list[str] = field(default_factory=list)
    footnotes: list[str] = field(default_factory=list)
    same: list[tuple[str, str]] = field(default_factory=list)

    @property
    def cells(self) -> list[Cell]:
        return [cell for block in self.blocks for line in block.lines for cell in line.cells]


def shown(value: Any, form: str = ".2f") -> str:
    """Print a value on paper: floats in this form, nothing as a dash."""
    if missing(value):
        return "-"
    return format(value, form) if isinstance(value, float) else str(value)


def missing(value: Any) -> bool:
    """Return whether a cell holds nothing."""
    return value is None or (isinstance(value, float) and value != value)


def _interval(row: dict[Any, Any], name: str) -> tuple[float, float, str] | None:
    """Return the ends of a value's interval and its mark; None where it has no interval."""
    low, high = (row.get(f"{name}_{end}") for end in ("low", "high"))
    if missing(low) or missing(high):
        return None
    return low, high, UNSURE if name.startswith("speedup") and spans_one(low, high) else ""  # type: ignore[return-value,arg-type]


def interval_text(low: float, high: float) -> str:
    """Return an interval as tables print it."""
    return f"[{low:.2f}, {high:.2f}]"


def main_view(runs: Sequence[Run], table: pd.DataFrame, more: Sequence[str] = (), category: str = "") -> View:
    """View the main table on paper, one block a model and bench.

    Args:
        more: further footnotes.
        category: only these rows and in few columns, without intervals, for a terminal; empty: all.
    """
    rows = table[table["category"] == category] if category else table
    several = len(notes.executions(table)) > 1
    drawn = []
    for title, block in blocks(rows).items():
        shared = _shared_counts(block) if category else {}
        shown_columns = [c for c in COLUMNS if _on_paper(c, block, TERMINAL if category else MARKDOWN, several)]
        headings = [Heading(c.name, (category and c.title) or c.name) for c in shown_columns if c.name not in shared]
        if category:
            counts = [f"{count} {name}" for name, count in shared.items() if f"{count} {name}" not in title]
            title = f"{title}, {category}" + (f" ({', '.join(counts)})" if counts else "")
        drawn.append(Block(headings, _lines(block, headings, partial(paper_cell, with_interval=not category)), title))
    head = ["\n".join(notes.heading(runs)), *notes.execution_words(table)]
    footnotes = notes.table_notes(rows, any(cell.interval for cell in View(drawn).cells))
    footnotes += [*notes.not_compared(pools(runs)), *notes.incomplete(runs), *notes.mixed(runs)]
    footnotes += [*([] if category else notes.executed(runs)), *more]
    return View(drawn, "Main table", head, footnotes)


def _on_paper(column: Column, block: pd.DataFrame, output: str, several_executions: bool) -> bool:
    """Return whether a block shows a column: it says something there, and not the same of every row."""
    if output not in column.shown or column.name not in block:
        return False
    if column.name == "execution":
        return several_executions
    values = block[column.name]
    return bool((values > 1).any() if column.name == "repeats" else (values.notna() & (values != "")).any())


def _shared_counts(rows: pd.DataFrame) -> dict[str, int]:
    """Return the counts that all measured rows share, for a terminal's title; repeats only where there are several."""
    measured = rows[rows["questions"] > 0]
    shared = {n: int(measured[n].iloc[0]) for n in ("questions", "repeats") if measured[n].nunique() == 1}
    return {name: count for name, count in shared.items() if name == "questions" or count > 1}


def _lines(table: pd.DataFrame, columns: Sequence[Heading], cell: Callable[[dict[Any, Any], str], Cell]) -> list[Line]:
    """Return the rows of the main table, each value as `cell` prints it."""
    return [
        Line([cell(row, column.name) for column in columns], str(row["method"]), str(row["category"]))
        for row in table.to_dict("records")
    ]


def paper_cell(row: dict[Any, Any], name: str, with_interval: bool) -> Cell:
    """Return a value of the main table as on paper: two decimals, the interval of MAT and speedups behind it."""
    text, interval = shown(row[name]) + _executed(row, name), _interval(row, name)
    if interval is None:
        return Cell(text)
    low, high, mark = interval
    printed = with_interval and low < high and (name == "mat" or name.startswith("speedup"))
    return Cell(text, interval_text(low, high) if printed else "", mark)


def _executed(row: dict[Any, Any], name: str) -> str:
    """Write next to a speedup over hf and to a published one how their steps were taken."""
    if name not in ("speedup_hf", "published_speedup_hf") or missing(row.get("published_source")):
        return ""
    return f" ({row['execution'] if name == 'speedup_hf' else PUBLISHED_EXECUTION})"


def page_view(table: pd.DataFrame) -> View:
    """View the main table on the page, in one block: every number, with the value to sort by.

    Constant settings stand above it, empty measures are left out.
    """
    columns, same = [], []
    names = set(map(str, table.columns))
    has_variants = "variant" in names and bool((table["variant"] != "").any())  # how methods of one name differ
    for about in map(column, map(str, table.columns)):
        name, values = about.name, table[about.name]
        if name.removesuffix("_low").removesuffix("_high") in names - {name}:
            continue  # an end of an interval: printed with its value
        measure = not about.setting and pd.api.types.is_numeric_dtype(values) and values.dtype != bool
        main = PAGE in about.shown
        if name in ("method", "category") or (measure and values.notna().any()):
            columns.append(_heading(about, number=measure, extra=measure and not main))
        elif not measure and values.map(_page_text).nunique() == 1:
            text = _page_text(values.iloc[0])
            same += [(name.replace("_", " "), text)] if SETUP not in about.shown and text not in ("–", "False") else []
        elif not measure and values.notna().any():
            if name == "execution":  # one for all is said above the table
                main = len(notes.executions(table)) > 1
            elif not has_variants and not name.startswith("execution"):
                keys = ["method", *(("bench", "bench_questions") if name == "questions_sha256" else ())]
                main = main or bool((table.groupby(keys, sort=False)[name].nunique(dropna=False) > 1).any())
            columns.append(_heading(about, number=about.setting, extra=not main))
    columns.sort(key=lambda c: (c.extra, c.name != "method", c.number))  # stable: names, then numbers, then extras
    view = View([Block(columns, _lines(table, columns, _page_cell))], same=same)
    if any(cell.interval for cell in view.cells):
        of = "MAT over questions, speeds over questions and repeats"
        view.footnotes.append(f"Small print: 95 % bootstrap intervals ({of}).")
        if notes.drift_unknown(table):
            view.footnotes.append(notes.ONE_REPEAT[0].upper() + notes.ONE_REPEAT[1:] + ".")
    if any(cell.mark for cell in view.cells):
        view.footnotes.append(notes.unsure_note("interval") + ".")
    return view


def _heading(column: Column, *, number: bool, extra: bool) -> Heading:
    title = (column.title or column.name).replace("_", " ").replace("speedup ", "speedup over ")
    return Heading(column.name, title, number, extra, column.definition)


def _page_cell(row: dict[Any, Any], name: str) -> Cell:
    value, interval, form = row[name], _interval(row, name), column(name).form
    ends = list(dict.fromkeys(_page_text(end, form) for end in interval[:2])) if interval else []
    printed = len(ends) > 1 and interval
    text = "" if missing(value) else str(value)
    shown_value = _page_text(value, form) + _executed(row, name)
    return Cell(shown_value, "–".join(ends) if printed else "", printed[2] if printed else "", text)


def _page_text(value: Any, form: str = ".2f") -> str:
    if missing(value) or value == "":
        return "–"
    if isinstance(value, float):
        return format(value, form)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table1_view(table: pd.DataFrame, footnotes: Sequence[str] = ()) -> View:
    """View Table 1 in the paper's layout, one block a model; speedups have an x behind them."""
    head = (
        "Columns 3 to 8 are speedups by subtask; then Spec-Bench as a whole, then MBPP (the code subtask).\n"
        "Speedups are over AR: transformers' own generate. Published: A100-80GB, float16, 1,024 new tokens."
    )
    columns = [Heading("name", "method", False), Heading("source", "figures", False)]
    columns += [Heading(column.name, column.title) for column in TABLE1]
    drawn = []
    for model, rows in table.groupby("model", sort=False):
        devices = "; ".join(filter(None, rows["device"].unique()))
        lines = [Line(_table1_cells(row), str(row["method"])) for row in rows.to_dict("records")]
        drawn.append(Block(columns, lines, f"{model} (measured on {devices})" if devices else str(model)))
    return View(drawn, "Table 1", [head], list(footnotes))


def _table1_cells(row: dict[Any, Any]) -> list[Cell]:
    source = str(row["source"])
    if source == MEASURED:  # on what, and how its steps were taken
        source += ": " + "; ".join(word for word in (row["measured"], row["execution"]) if word)
    figures = {column.name: shown(row[column.name]) for column in TABLE1}
    texts = [f"{text}x" if name.endswith("speedup") and text != "-" else text for name, text in figures.items()]
    return [Cell(text) for text in (str(row["name"]), source, *texts)]


def wrapped(line: str, width: int | None) -> str:
    """Break a line between words so that it fits a terminal of this width; not one with a command to copy."""
    if width is None or "python -m" in line:
        return line
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of aligned columns: the first to the left, the others to the right."""
    first, *rest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]) for row in rows]


def to_text(view: View, width: int | None = None) -> str:
    """Render for a terminal of this width: aligned columns, no intervals."""
    out = [wrapped(line, width) for text in view.head for line in text.splitlines()]
    for block in view.blocks:
        cells = [[c.title for c in block.columns]] + [[c.text + c.mark for c in line.cells] for line in block.lines]
        out += ["", f"{block.title}:", *aligned(cells)]
    return "\n".join([*out, *(wrapped(note, width) for note in view.footnotes)])


def to_markdown(view: View) -> str:
    """Render as Markdown: one section a block."""
    out = [f"# {view.title}", *view.head]
    for block in view.blocks:
        rows = ([cell.printed for cell in line.cells] for line in block.lines)
        table = markdown((column.title for column in block.columns), rows)
        out += [f"## {block.title}", table]
    return "\n\n".join([*out, *view.footnotes]) + "\n"


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Render a table's lines as Markdown, its head first."""
    head = list(columns)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def to_latex(view: View) -> str:
    r"""Render Table 1 with \usepackage{booktabs}: published rows in italics."""
    titles = [column.title for column in view.blocks[0].columns[2:]]
    lines = [f"% {note}" for note in view.footnotes] + [
        "% needs \\usepackage{booktabs}; published rows are in italics",
        "\\begin{tabular}{ll" + "r" * len(titles) + "}",
        "\\toprule",
        " & & \\multicolumn{9}{c}{Spec-Bench} & \\multicolumn{3}{c}{MBPP} \\\\",
        "\\cmidrule(lr){3-11} \\cmidrule(lr){12-14}",
        " & ".join(["Model", "Method", *titles]) + " \\\\",
    ]
    for block in view.blocks:
        lines.append("\\midrule")
        model = block.title.partition(" (measured on ")[0]
        for first, line in zip([_escape(model), *[""] * len(block.lines)], block.lines, strict=False):
            lines.append(" & ".join([first, *_latex_cells(line)]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _latex_cells(line: Line) -> list[str]:
    """Return the method, in small print what its row was measured on, and its figures."""
    name, source, *texts = (cell.text for cell in line.cells)
    name, figures = _escape(name), [text.replace("x", "$\\times$") for text in texts]
    if source == PUBLISHED:
        return [f"\\textit{{{text}}}" for text in (name, *figures)]
    if source.startswith(f"{MEASURED}: "):
        return [f"{name} {{\\scriptsize ({_escape(source.removeprefix(f'{MEASURED}: '))})}}", *figures]
    return [name, f"\\multicolumn{{{len(figures)}}}{{l}}{{{_escape(source)}}}"]


def _escape(text: str) -> str:
    """Return what LaTeX reads as the text itself."""
    return "".join(f"\\{c}" if c in "&%$#_{}" else {"~": "\\~{}", "^": "\\^{}", "\\": "/"}.get(c, c) for c in text)


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write the rows themselves, with every digit."""
    write_text(path, table.to_csv(index=False))


def write_tables(runs: Sequence[Run], folder: Path, more: Sequence[str] = ()) -> pd.DataFrame:
    """Write main.csv (every digit), main.md (rounded) and what else the runs hold below `folder`.

    Returns:
        The table of what was measured; the files also list what was not available.
    """
    table = with_published(main_table(runs))
    complete = with_unavailable(table, folder.parent)
    write_csv(folder / "main.csv", complete)
    write_text(folder / "main.md", to_markdown(main_view(runs, complete, more)))
    depths, memory = depths_table(runs), memory_table(runs)
    if not depths.empty:
        write_csv(folder / "acceptance_by_depth.csv", depths)
        write_csv(folder / "acceptance_by_node.csv", nodes_table(runs))
    if not memory.empty:
        write_csv(folder / "memory.csv", memory)
    greedy = table[table["temperature"] == 0.0]  # as the paper's are
    if (greedy["method"] == "hf").any():  # without it there is nothing that the paper's speedups are over
        write_table1(greedy, folder, not_available(folder.parent), notes.mixed(runs))
    return table


def write_table1(
    table: pd.DataFrame, folder: Path, left_out: Sequence[dict[str, str]] = (), footnotes: Sequence[str] = ()
) -> None:
    """Write table1.csv (every digit), table1.md and table1.tex (booktabs), in the paper's layout."""
    table = table1(table, left_out)
    view = table1_view(table, footnotes)
    write_csv(folder / "table1.csv", table)
    write_text(folder / "table1.md", to_markdown(view))
    write_text(folder / "table1.tex", to_latex(view))
