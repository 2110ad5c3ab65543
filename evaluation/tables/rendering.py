"""Render tables for terminal, Markdown and the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from model.errors import one_line
from model.files import write_text

from ..statistics.agreement import audit_table, read_gaps, wording
from ..statistics.intervals import spans_one
from ..statistics.metrics import OVERALL
from . import notes
from .experiment import Experiment
from .notes import UNSURE
from .tables import COLUMNS, MARKDOWN, PAGE, TERMINAL, Column, blocks, column

# the page's first columns
LEADING = ("method", "mat", "tokens_per_second", "speedup_hf", "speedup_vanilla", "questions")
RULE = (
    "Verification accepts a draft token only if the target itself picks it"
    " (model/engine/rule/verification.py). This audit compares the recorded answers with vanilla's."
)


class Cell(NamedTuple):
    text: str
    interval: str = ""  # its 95 % interval as printed, where known
    mark: str = ""  # points to a footnote: `~` if the interval of a speedup spans 1
    value: str = ""  # what to sort by; empty if there is none

    @property
    def printed(self) -> str:
        return f"{self.text}{self.mark} {self.interval}".rstrip()


@dataclass(frozen=True)
class Block:
    """Rows of the main table, and the columns that are shown of them."""

    title: str
    columns: list[Column]
    rows: list[dict[Any, Any]]
    with_intervals: bool = True

    # names of columns that the page sorts as numbers, and of those that it hides until asked for
    numbers: set[str] = field(default_factory=set)
    extra: set[str] = field(default_factory=set)

    def cells(self, row: dict[Any, Any]) -> list[Cell]:
        return [cell(row, about.name, with_interval=self.with_intervals) for about in self.columns]

    @property
    def configurations(self) -> list[list[dict[Any, Any]]]:
        """The rows of each configuration, the overall one first, then its subtasks."""
        configurations = []
        subtasks = list[dict[Any, Any]]()
        for row in self.rows:
            if row["category"] == OVERALL:
                configurations.append([row, *subtasks])
                subtasks = []
            else:
                subtasks.append(row)
        return configurations


@dataclass(frozen=True)
class View:
    """A table: paragraphs above it, its blocks, footnotes."""

    blocks: list[Block]
    head: list[str]
    footnotes: list[str]


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
    return f"[{low:{form}}, {high:{form}}]"


def cell(row: dict[Any, Any], name: str, *, with_interval: bool = True) -> Cell:
    form = column(name).form
    value = row[name]
    low: float = row.get(f"{name}_low", math.nan)
    high: float = row.get(f"{name}_high", math.nan)
    interval = ""
    mark = ""
    if low < high:
        interval = interval_text(low, high, form) if with_interval else ""
        if name.startswith("speedup") and spans_one(low, high):
            mark = UNSURE

    to_sort_by = "" if pd.isna(value) else str(value)
    return Cell(shown(value, form), interval, mark, to_sort_by)


def main_view(experiment: Experiment, category: str = "") -> View:
    """Lay out the main table as text, one block for each model and bench.

    Args:
        category: only its rows, in few columns and without intervals, for a terminal.
    """
    runs = experiment.runs
    pools = experiment.pools
    table = experiment.table
    output = TERMINAL if category else MARKDOWN
    rows = table[table["category"] == category] if category else table

    drawn = []
    for name, block in blocks(rows).items():
        title = f"{name}, {category}" if category else name
        columns = _shown_columns(block, output)
        drawn.append(Block(title, columns, block.to_dict("records"), not category))

    footnotes = [
        *_table_notes(rows, drawn),
        *experiment.not_available,
        *notes.incomplete(runs),
        *notes.mixed(runs),
        *notes.other_prompts(pools),
        *notes.doubts(pools),
        *notes.served(pools),
    ]
    if not category:
        footnotes += [*notes.executed(runs), experiment.missing]
    head = ["\n".join(notes.heading(runs)), *notes.execution_words(table)]
    return View(drawn, head, [note for note in footnotes if note])


def _table_notes(table: pd.DataFrame, drawn: Sequence[Block]) -> list[str]:
    cells = [cell for block in drawn for row in block.rows for cell in block.cells(row)]
    intervals = any(cell.interval for cell in cells)
    return notes.table_notes(table, intervals, any(cell.mark for cell in cells))


def _shown_columns(block: pd.DataFrame, output: str) -> list[Column]:
    """Return the columns with values that an output shows of a block.

    `repeats` needs one above 1, the total speed a batch, and `execution` several executions.
    """
    needs = {
        "repeats": (block["repeats"] > 1).any(),
        "tokens_per_second_total": (block["batch"] > 1).any(),
        "execution": len(notes.executions(block)) > 1,
    }
    columns = []

    for about in COLUMNS:
        if output not in about.shown or about.name not in block:
            continue
        values = block[about.name]
        has_values = (values.notna() & (values != "")).any()
        if needs.get(about.name, has_values):
            columns.append(about)

    return columns


def page_view(experiment: Experiment) -> View:
    """Lay out the main table for the page, in one block.

    Empty columns are left out. Those that `columns.yaml` does not show on the page are hidden.
    """
    # a block's rows together; a column has the words of its name that others lack
    parts = blocks(experiment.table)
    names = [name.split(", ") for name in parts]
    common = set.intersection(*map(set, names))
    own = [", ".join(word for word in words if word not in common) for words in names]
    table = pd.concat(list(parts.values()), keys=own, names=["block"]).reset_index("block")
    shown_columns = _shown_columns(table, PAGE)
    hidden = []

    for name in map(str, table.dropna(axis=1, how="all")):
        about = column(name)
        has_own_cell = not name.endswith(("_low", "_high"))  # they are printed with their value
        if has_own_cell and name != "block" and about not in shown_columns:
            hidden.append(about)

    numbers = set(map(str, table.select_dtypes("number").columns))
    extra = {about.name for about in hidden}

    def place(about: Column) -> tuple[bool, int]:
        leading = LEADING.index(about.name) if about.name in LEADING else len(LEADING)
        return about.name in extra, leading

    columns = sorted([*shown_columns, *hidden], key=place)
    block = Block(
        title="",
        columns=columns,
        rows=table.to_dict("records"),
        numbers=numbers,
        extra=extra,
    )
    footnotes = [*_table_notes(table, [block]), *experiment.not_available]
    return View([block], head=[], footnotes=footnotes)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of aligned columns, the first to the left, others to the right."""
    first, *rest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *values in rows:
        lines.append("  ".join([name.ljust(first), *map(str.rjust, values, rest)]))
    return lines


def to_text(view: View) -> str:
    out = list(view.head)
    for block in view.blocks:
        rows = [[cell.text + cell.mark for cell in block.cells(row)] for row in block.rows]
        headings = [column.heading for column in block.columns]
        out += ["", f"{block.title}:", *aligned([headings, *rows])]
    return "\n".join([*out, *view.footnotes])


def to_markdown(view: View) -> str:
    out = ["# Main table", *view.head]
    for block in view.blocks:
        rows = [[cell.printed for cell in block.cells(row)] for row in block.rows]
        headings = [column.heading for column in block.columns]
        out += [f"## {one_line(block.title)}", markdown(headings, rows)]
    return "\n\n".join([*out, *view.footnotes]) + "\n"


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Render a table's lines as Markdown, the header first."""
    headings = list(columns)
    lines = []
    for cells in (headings, *rows):
        texts = [" ".join(cell.replace("|", "\\|").split()) for cell in cells]
        lines.append("".join(f"| {text} " for text in texts) + "|")
    lines.insert(1, "|" + "---|" * len(headings))
    return "\n".join(lines)


def write_csv(path: Path, table: pd.DataFrame) -> None:
    write_text(path, table.to_csv(index=False))


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
    cells = []
    for row in table.itertuples(index=False):
        cells.append([shown(value, ".4g") for value in row])
    parts = ["# Audit", RULE, *lines, markdown(table.columns, cells)]
    write_text(folder / "audit.md", "\n\n".join(parts) + "\n")
    return lines
