"""Render tables for terminal, Markdown, LaTeX and the page.

Cells are made once from the rows. CSV holds the rows with every digit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from model.errors import one_line
from model.files import write_text

from . import notes
from .agreement import audit_table, read_gaps, wording
from .experiment import Experiment
from .intervals import spans_one
from .metrics import OVERALL
from .notes import UNSURE
from .published import MEASURED, PUBLISHED_EXECUTION, table1
from .tables import (
    COLUMNS,
    MARKDOWN,
    PAGE,
    SETUP,
    TABLE1,
    TERMINAL,
    Column,
    blocks,
    column,
    depths_table,
)

RULE = (
    "Verification accepts a draft token only if the target itself picks it"
    " (model/engine/verification.py). This audit compares the recorded answers with vanilla's."
)


class Cell(NamedTuple):
    """A value as printed."""

    text: str
    interval: str = ""  # its 95 % interval as printed, where known
    mark: str = ""  # points to a footnote: `~` if the interval of a speedup spans 1
    value: str = ""  # what to sort by; empty if there is none

    @property
    def printed(self) -> str:
        """The value with its mark, followed by its interval."""
        return " ".join(filter(None, (self.text + self.mark, self.interval)))


class Line(NamedTuple):
    """A row: its cells in the order of the columns, and what it is filtered by."""

    cells: list[Cell]
    method: str
    category: str = ""


@dataclass(frozen=True)
class Block:
    """A part of a table with columns of its own, and its title."""

    columns: list[Column]
    lines: list[Line]
    title: str = ""

    # names of columns that the page sorts as numbers
    numbers: set[str] = field(default_factory=set)

    # names of columns that the page hides until asked for
    extra: set[str] = field(default_factory=set)

    @property
    def configurations(self) -> list[list[Line]]:
        """The lines of each configuration, the overall one first, then its subtasks."""
        configurations = []
        subtasks: list[Line] = []
        for line in self.lines:
            if line.category == OVERALL:  # the last line of its configuration
                configurations.append([line, *subtasks])
                subtasks = []
            else:
                subtasks.append(line)
        return configurations

    @property
    def has_intervals(self) -> bool:
        cells = itertools.chain.from_iterable(line.cells for line in self.lines)
        return any(cell.interval for cell in cells)


@dataclass(frozen=True)
class View:
    """A table: paragraphs above it, its blocks, footnotes."""

    blocks: list[Block]
    title: str = ""
    head: list[str] = field(default_factory=list)
    footnotes: list[str] = field(default_factory=list)
    same: list[tuple[str, str]] = field(default_factory=list)  # settings that all rows share


def shown(value: Any, form: str = ".2f") -> str:
    """Format a value: floats by `form`, a missing value as a dash.

    Integers have separators unless `form` is "g".
    """
    if pd.isna(value):
        return "-"
    if isinstance(value, float):
        return format(value, form)
    if isinstance(value, bool) or not isinstance(value, int) or form == "g":
        return str(value)
    return f"{value:,}"


def interval_text(low: float, high: float, form: str = ".2f") -> str:
    """Return an interval as tables print it."""
    return f"[{low:{form}}, {high:{form}}]"


def cell(row: dict[Any, Any], name: str, *, with_interval: bool = True) -> Cell:
    """Return a value of the main table as printed."""
    form = column(name).form
    value = row[name]
    text = shown(value, form)
    if not pd.isna(row.get("published_source")):
        if name == "speedup_hf":
            text += f" ({row['execution']})"
        elif name == "published_speedup_hf":
            text += f" ({PUBLISHED_EXECUTION})"

    interval = ""
    mark = ""
    low = row.get(f"{name}_low")
    high = row.get(f"{name}_high")
    if not pd.isna(low) and not pd.isna(high):
        if with_interval and low < high:
            interval = interval_text(float(low), float(high), form)
        if name.startswith("speedup") and spans_one(low, high):
            mark = UNSURE
    return Cell(text, interval, mark, "" if pd.isna(value) else str(value))


def main_view(experiment: Experiment, category: str = "") -> View:
    """Lay out the main table as text, one block for each model and bench.

    Args:
        category: only its rows, in few columns and without intervals, for a terminal; empty: all
            rows.
    """
    runs = experiment.runs
    table = experiment.whole_table
    rows = table[table["category"] == category] if category else table
    several = len(notes.executions(table)) > 1
    output = TERMINAL if category else MARKDOWN

    drawn = []
    for title, block in blocks(rows).items():
        columns = [column for column in COLUMNS if _on_paper(column, block, output, several)]
        lines = _lines(block, columns, with_intervals=not category)
        drawn.append(Block(columns, lines, f"{title}, {category}" if category else title))

    head = ["\n".join(notes.heading(runs)), *notes.execution_words(table)]
    footnotes = [
        *notes.table_notes(rows, any(block.has_intervals for block in drawn)),
        *notes.not_compared(experiment.pools),
        *notes.incomplete(runs),
        *notes.mixed(runs),
        *notes.doubts(experiment.pools),
        *notes.served(experiment.pools),
    ]
    if not category:
        footnotes += [*notes.executed(runs), *filter(None, [experiment.missing])]
    return View(drawn, "Main table", head, footnotes)


def _on_paper(column: Column, block: pd.DataFrame, output: str, several_executions: bool) -> bool:
    """Return whether a block shows a column.

    The column needs values in the block; `repeats` needs one above 1, the total speed a batch, and
    `execution` several executions in the table.
    """
    if output not in column.shown or column.name not in block:
        return False
    if column.name == "execution":
        return several_executions
    if column.name == "repeats":
        return bool((block["repeats"] > 1).any())
    if column.name == "tokens_per_second_total":
        return bool((block["batch"] > 1).any())
    values = block[column.name]
    return bool((values.notna() & (values != "")).any())


def _lines(
    table: pd.DataFrame, columns: Sequence[Column], *, with_intervals: bool = True
) -> list[Line]:
    """Return the rows of the main table as printed."""
    lines = []
    for row in table.to_dict("records"):
        cells = [cell(row, column.name, with_interval=with_intervals) for column in columns]
        lines.append(Line(cells, str(row["method"]), str(row["category"])))
    return lines


def page_view(table: pd.DataFrame) -> View:
    """Lay out the main table for the page, in one block: every number, with the value to sort by.

    Values that all rows share are above the table, and empty measures are left out. If there are
    several models or benches, a column names them.
    """
    rows = pd.concat([rows.assign(block=title) for title, rows in blocks(table).items()])
    several = len(notes.executions(table)) > 1
    columns = []
    same = []
    numbers = set[str]()
    extra = set[str]()

    for about in map(column, map(str, rows.columns)):
        name = about.name
        values = rows[name]
        measured = name.removesuffix("_low").removesuffix("_high")
        if measured != name and measured in rows:
            continue  # an end of an interval: printed with its value

        is_number = pd.api.types.is_numeric_dtype(values) and values.dtype != bool
        is_setting = about.form == "g"
        measure = is_number and not is_setting
        if not measure and name not in ("method", "category") and values.map(shown).nunique() == 1:
            text = shown(values.iloc[0])
            elsewhere = not {SETUP, PAGE}.isdisjoint(about.shown)
            if not elsewhere and text not in ("-", "", "False"):
                same.append((name.replace("_", " "), text))
        elif values.notna().any():
            columns.append(about)
            if measure or is_setting:
                numbers.add(name)
            if not _on_paper(about, rows, PAGE, several):
                extra.add(name)

    # names, numbers, extras
    columns.sort(key=lambda c: (c.name in extra, c.name != "method", c.name in numbers))
    block = Block(columns, _lines(rows, columns), numbers=numbers, extra=extra)
    return View([block], footnotes=notes.table_notes(rows, block.has_intervals), same=same)


def table1_view(table: pd.DataFrame, footnotes: Sequence[str] = ()) -> View:
    """Lay out Table 1 as in the paper, one block for each model; speedups end in x."""
    head = (
        "Columns 3 to 8 are speedups by subtask; then Spec-Bench as a whole, then MBPP (the code"
        " subtask).\nSpeedups are over AR: transformers' own generate. Published: A100-80GB,"
        " float16, 1,024 new tokens."
    )
    columns = [Column("name", title="method"), Column("source", title="figures"), *TABLE1]

    drawn = []
    for model, rows in table.groupby("model", sort=False):
        devices = "; ".join(filter(None, rows["device"].unique()))
        title = f"{model} (measured on {devices})" if devices else str(model)
        lines = [_table1_line(row) for row in rows.to_dict("records")]
        drawn.append(Block(columns, lines, title))
    return View(drawn, "Table 1", [head], list(footnotes))


def _table1_line(row: dict[Any, Any]) -> Line:
    source = str(row["source"])
    if source == MEASURED:
        # bench and questions, then execution
        how = filter(None, (row["measured"], row["execution"]))
        source = f"{MEASURED}: {'; '.join(how)}"

    cells = [Cell(str(row["name"])), Cell(source)]
    for about in TABLE1:
        text = shown(row[about.name])
        speedup = about.name.endswith("speedup") and text != "-"
        cells.append(Cell(f"{text}x" if speedup else text))
    return Line(cells, str(row["method"]))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of aligned columns, the first to the left, others to the right."""
    first, *rest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]) for row in rows]


def to_text(view: View) -> str:
    """Render for a terminal: aligned columns, no intervals."""
    out = list(view.head)
    for block in view.blocks:
        rows = [[column.heading for column in block.columns]]
        for line in block.lines:
            rows.append([cell.text + cell.mark for cell in line.cells])
        out += ["", f"{block.title}:", *aligned(rows)]
    return "\n".join([*out, *view.footnotes])


def to_markdown(view: View) -> str:
    """Render as Markdown: one section a block."""
    out = [f"# {view.title}", *view.head]
    for block in view.blocks:
        headings = [column.heading for column in block.columns]
        rows = ([cell.printed for cell in line.cells] for line in block.lines)
        out += [f"## {one_line(block.title)}", markdown(headings, rows)]
    return "\n\n".join([*out, *view.footnotes]) + "\n"


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Render a table's lines as Markdown, the header first; `|` in cells is escaped."""
    lines = []
    headings = list(columns)
    for cells in (headings, *rows):
        escaped = (" ".join(cell.replace("|", "\\|").split()) for cell in cells)
        lines.append(f"| {' | '.join(escaped)} |")
    rule = "|" + "---|" * len(headings)
    return "\n".join([lines[0], rule, *lines[1:]])


def to_latex(view: View) -> str:
    r"""Render Table 1 with \usepackage{booktabs}, its model in each row.

    Rules are between models and below benches.
    """
    benches = ["Spec-Bench"] * 9 + ["MBPP"] * 3
    heads = [("", "Model")]
    heads += [("", column.title) for column in view.blocks[0].columns[:2]]
    heads += zip(benches, (column.title for column in TABLE1), strict=True)

    rows = []
    for block in view.blocks:
        model = block.title.partition(" (measured on ")[0]
        for line in block.lines:
            texts = [model, *(cell.text for cell in line.cells)]
            rows.append([one_line(text) for text in texts])

    frame = pd.DataFrame(rows, columns=pd.MultiIndex.from_tuples(heads))
    right = "r" * len(TABLE1)
    latex = frame.to_latex(
        index=False,
        escape=True,
        multicolumn_format="c",
        column_format=f"lll{right}",
        caption=" ".join(view.head).replace("\n", " "),
        label="tab:1",
    )

    lines = latex.split("\n")
    head = next(i for i, line in enumerate(lines) if "multicolumn" in line)
    ends = list(itertools.accumulate(len(block.lines) for block in view.blocks[:-1]))
    for end in reversed(ends):
        lines.insert(head + 3 + end, r"\midrule")
    lines.insert(head + 1, r"\cmidrule(lr){4-12} \cmidrule(lr){13-15}")

    # else \\ takes it as an option
    rows_apart = re.sub(r"^(?=[*\[])", "{}", "\n".join(lines), flags=re.MULTILINE)
    above = [*view.footnotes, r"needs \usepackage{booktabs}"]
    return "".join(f"% {one_line(note)}\n" for note in above) + rows_apart


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write the rows themselves, with every digit."""
    write_text(path, table.to_csv(index=False))


def write_tables(experiment: Experiment, folder: Path) -> list[str]:
    """Write main.csv (every digit), main.md (rounded) and the other tables that the runs give.

    Returns:
        The audit in words.
    """
    write_csv(folder / "main.csv", experiment.whole_table)
    write_text(folder / "main.md", to_markdown(main_view(experiment)))

    depths = depths_table(experiment.pools)
    if not depths.empty:
        write_csv(folder / "acceptance_by_depth.csv", depths)

    greedy = experiment.table[experiment.table["temperature"] == 0.0]  # as the paper's are
    if (greedy["method"] == "hf").any():  # the baseline of the paper's speedups
        footnotes = notes.mixed(experiment.runs) + notes.doubts(experiment.pools)
        write_table1(greedy, folder, experiment.not_available, footnotes)
    return write_audit(experiment, folder)


def write_table1(
    table: pd.DataFrame,
    folder: Path,
    left_out: Sequence[dict[str, str]] = (),
    footnotes: Sequence[str] = (),
) -> None:
    """Write table1.csv (every digit), table1.md and table1.tex, in the paper's layout."""
    table = table1(table, left_out)
    view = table1_view(table, footnotes)
    write_csv(folder / "table1.csv", table)
    write_text(folder / "table1.md", to_markdown(view))
    write_text(folder / "table1.tex", to_latex(view))


def write_audit(experiment: Experiment, folder: Path) -> list[str]:
    """Write audit.csv and audit.md below `folder`.

    Returns:
        The lines to print; none without vanilla.
    """
    home = experiment.folder or folder.parent
    table = audit_table(experiment.audits, read_gaps(home))
    if table.empty:
        return []

    lines = wording(table, home)
    write_csv(folder / "audit.csv", table)
    cells = ([shown(value, ".4g") for value in row] for row in table.itertuples(index=False))
    parts = ["# Audit", RULE, *lines, markdown(table.columns, cells)]
    write_text(folder / "audit.md", "\n\n".join(parts) + "\n")
    return lines
