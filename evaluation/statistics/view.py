"""A table as people see it: a view, built once from the rows, and one renderer each for its outputs.

Terminal text, Markdown and LaTeX are rendered here, HTML by the page's template. CSV holds the rows with every digit.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from model.files import ROOT, write_text

from ..records.runs import Run
from ..records.sweeps import not_available
from . import caveats
from .acceptance import depths_table, nodes_table
from .caveats import UNSURE
from .intervals import spans_one
from .metrics import OVERALL
from .pools import pools
from .published import APART, MEASURED, PUBLISHED, TABLE1_COLUMNS, table1, with_published
from .tables import BASELINES, GROUP, NOTE, group_names, main_table, memory_table, with_unavailable

SHOWN = ("method", "category", "questions", "new_tokens", "mat", "mat_macro", "tokens_per_second")
IN_FILES = ("category", "new_tokens", "mat_macro")  # left out in a terminal
COUNTS = ("questions", "repeats")  # in a terminal's title where all rows share them
# Numbers that are settings and no measures.
SETTINGS = ("tree_nodes", "tree_depth", "tree_breadth", "k", "seed", "bench_questions", "max_new_tokens")
# Settings that the page says elsewhere.
SAID = (
    *("model", "bench", "dtype", "device", "complete", "execution", "seed", "max_new_tokens", "timed"),
    *("bench_questions", "questions_sha256", "temperature", "execution_hf", "execution_vanilla"),
)
TITLES = {
    "mat": "MAT",
    "mat_macro": "MAT macro",
    "tokens_per_second": "tokens/s",
    "tokens_per_second_total": "tokens/s, total",
    "tokens_per_second_decode": "tokens/s, decode",
    "tokens_per_second_std": "tokens/s, std",
    "new_tokens": "new tokens",
}


@dataclass(frozen=True)
class Column:
    """A column: `extra` ones are hidden on the page until asked for; `meaning` is its written definition, if any."""

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


@dataclass(frozen=True)
class Line:
    """A row: its cells in the order of the columns, and what it is filtered by."""

    cells: list[Cell]
    method: str
    category: str = ""

    @property
    def baseline(self) -> bool:
        return self.method in BASELINES

    @property
    def overall(self) -> bool:
        return self.category == OVERALL


@dataclass(frozen=True)
class Block:
    """A part of a table with columns of its own, what stands above it, and of Table 1 its bench and model."""

    columns: list[Column]
    lines: list[Line]
    title: str = ""
    lead: str = ""
    bench: str = ""
    model: str = ""

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(line.method for line in self.lines))

    @property
    def subtasks(self) -> list[str]:
        return list(dict.fromkeys(line.category for line in self.lines if not line.overall))

    @property
    def configurations(self) -> list[list[Line]]:
        """The lines of each configuration, the overall one first, then its subtasks."""
        groups: list[list[Line]] = [[]]
        for line in self.lines:
            groups[-1].append(line)
            if line.overall:
                groups.append([])
        return [[group[-1], *group[:-1]] for group in groups if group]

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
    ends: list[Any] = [row.get(f"{name}_{end}") for end in ("low", "high")]
    low, high = ends
    if missing(low) or missing(high):
        return None
    return low, high, UNSURE if name.startswith("speedup") and spans_one(low, high) else ""


def interval_text(low: float, high: float) -> str:
    """Return an interval as tables print it."""
    return f"[{low:.2f}, {high:.2f}]"


def main_view(runs: Sequence[Run], table: pd.DataFrame, notes: Sequence[str] = (), category: str = "") -> View:
    """View the main table on paper, one block a model and bench.

    Args:
        notes: more footnotes.
        category: only these rows and in few columns, without intervals, for a terminal; empty: all.
    """
    names, rows = group_names(table), table[table["category"] == category] if category else table
    blocks = []
    for key, group in rows.groupby(GROUP, sort=False):
        kept, title = _paper_columns(group, table), names[key]
        if category:
            shared = _shared_counts(group)
            said = [f"{count} {name}" for name, count in shared.items() if f"{count} {name}" not in title]
            title = f"{title}, {category}" + (f" ({', '.join(said)})" if said else "")
            kept = [name for name in kept if name not in IN_FILES and name not in shared]
        columns = [Column(name, TITLES.get(name, name) if category else name) for name in kept]
        lines = _lines(group, columns, partial(paper_cell, with_interval=not category))
        blocks.append(Block(columns, lines, title))
    head = ["\n".join(caveats.heading(runs)), *caveats.execution_words(table)]
    footnotes = caveats.table_notes(rows, any(cell.interval for cell in View(blocks).cells))
    footnotes += [*caveats.not_compared(pools(runs)), *caveats.incomplete(runs), *caveats.mixed(runs)]
    footnotes += [*([] if category else caveats.executed(runs)), *notes]
    return View(blocks, "Main table", head, footnotes)


def _shared_counts(rows: pd.DataFrame) -> dict[str, int]:
    """Return the counts that all measured rows share; repeats only where there are several."""
    measured = rows[rows["questions"] > 0]
    shared = {name: int(measured[name].iloc[0]) for name in COUNTS if measured[name].nunique() == 1}
    return {name: count for name, count in shared.items() if name == "questions" or count > 1}


def _lines(table: pd.DataFrame, columns: Sequence[Column], cell: Callable[[dict[Any, Any], str], Cell]) -> list[Line]:
    """Return the rows of the main table, each value as `cell` prints it."""
    return [
        Line([cell(row, column.name) for column in columns], str(row["method"]), str(row["category"]))
        for row in table.to_dict("records")
    ]


def _paper_columns(block: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Choose the columns: fixed ones, variant and execution where there are several, spreads and speedups."""
    variant = ["variant"] if (block["variant"] != "").any() else []
    executed = ["execution"] if len(caveats.executions(table)) > 1 else []
    repeats = ["repeats"] if (block["repeats"] > 1).any() else []
    spread = [f"{c}_std" for c in ("tokens_per_second",) if repeats and block[f"{c}_std"].notna().any()]
    optional = [f"speedup_{b}" for b in BASELINES] + ["published_mat", "published_speedup_hf", NOTE]
    kept = [name for name in optional if name in block and block[name].notna().any()]
    measures = [c for c in SHOWN[3:] if block[c].notna().any()]  # of what was not timed there is no speed
    return [SHOWN[0], *variant, *executed, *SHOWN[1:3], *repeats, *measures, *spread, *kept]


def paper_cell(row: dict[Any, Any], name: str, with_interval: bool) -> Cell:
    """Return a value of the main table as on paper: two decimals, the interval of MAT and speedups behind it."""
    text, known = shown(row[name]), _interval(row, name)
    if known is None:
        return Cell(text)
    low, high, mark = known
    wanted = with_interval and low < high and (name == "mat" or name.startswith("speedup"))
    return Cell(text, interval_text(low, high) if wanted else "", mark)


def page_view(table: pd.DataFrame) -> View:
    """View the main table on the page, in one block: every number, with the value to sort by.

    Constant settings stand above it, empty measures are left out.
    """
    columns, same = [], []
    by_method = table.groupby("method", sort=False)
    names = set(map(str, table.columns))
    has_variants = "variant" in names and bool((table["variant"] != "").any())  # how methods of one name differ
    for name in map(str, table.columns):
        if name.removesuffix("_low").removesuffix("_high") in names - {name}:
            continue  # an end of an interval: printed with its value
        values = table[name]
        number = _is_measure(name, values)
        if name in ("method", "category") or (number and values.notna().any()):
            columns.append(_page_column(name, number, extra=number and not _is_main(name)))
        elif not number and values.map(_page_text).nunique() == 1:
            same.append((name, name.replace("_", " "), _page_text(values.iloc[0])))
        elif not number and values.notna().any():
            among = table.groupby(["method", "bench", "bench_questions"]) if name == "questions_sha256" else by_method
            tells_apart = not has_variants and bool((among[name].nunique(dropna=False) > 1).any())
            main = tells_apart or name in ("model", "bench", "variant", NOTE)
            if name.startswith("execution"):  # one for all is said above the table
                main = name == "execution" and len(caveats.executions(table)) > 1
            columns.append(_page_column(name, name in SETTINGS, extra=not main))
    columns.sort(key=lambda c: (c.extra, c.name != "method", c.number))  # stable: names, then numbers, then extras
    said = [(term, value) for name, term, value in same if name not in SAID and value not in ("–", "False")]
    blocks = [Block(columns, _lines(table, columns, _page_cell))]
    return View(blocks, footnotes=_page_footnotes(View(blocks).cells, caveats.drift_unknown(table)), same=said)


def _page_footnotes(cells: Sequence[Cell], one_repeat: bool) -> list[str]:
    notes = []
    if any(cell.interval for cell in cells):
        notes.append("Small print: 95 % bootstrap intervals (MAT over questions, speeds over questions and repeats).")
        if one_repeat:
            notes.append(caveats.ONE_REPEAT[0].upper() + caveats.ONE_REPEAT[1:] + ".")
    if any(cell.mark for cell in cells):
        notes.append(caveats.unsure_note("interval") + ".")
    return notes


def _is_measure(name: str, values: Any) -> bool:
    return name not in SETTINGS and pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def _is_main(name: str) -> bool:
    return name in SHOWN or (name.startswith(("speedup_", "published")) and not name.endswith("_std"))


def _page_column(name: str, number: bool, *, extra: bool) -> Column:
    title = TITLES.get(name, name.replace("_", " "))
    if name.startswith("speedup_"):
        title = "speedup over " + name.removeprefix("speedup_").replace("_", " ")
    return Column(name, title, number, extra, definitions().get(name, ""))


def _page_cell(row: dict[Any, Any], name: str) -> Cell:
    value, known = row[name], _interval(row, name)
    text, sorted_by = _page_text(value, name), "" if missing(value) else value
    ends = [] if known is None else [_page_text(end, name) for end in known[:2]]
    interval = "–".join(ends) if len(set(ends)) > 1 else ""
    return Cell(text, interval, known[2] if known and interval else "", str(sorted_by))


def _page_text(value: Any, name: str = "") -> str:
    if missing(value) or value == "":
        return "–"
    if isinstance(value, float):
        if name in SETTINGS:
            return f"{value:g}"
        return f"{value:,.1f}" if name.startswith("tokens_per_second") else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@lru_cache(maxsize=1)
def definitions() -> dict[str, str]:
    """Read the written definition of each column from docs/concepts.md, the one place that has them."""
    try:
        text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    except OSError:
        return {}
    meanings: dict[str, str] = {}
    for names, unit, words in re.findall(r"^\| (.+?) \| (.*?) ?\| (.+) \|$", text, flags=re.M):
        for name in re.findall(r"`(\w+)`", names):
            plain = words.replace("`", "").strip()
            meanings[name] = f"{plain} ({unit.strip()})" if unit.strip() else plain
    return meanings


def table1_view(table: pd.DataFrame, footnotes: Sequence[str] = ()) -> View:
    """View Table 1 in the paper's layout, one block a bench and model; speedups have an x behind them."""
    head = (
        "Columns 3 to 8 are speedups by subtask; then Spec-Bench as a whole, then MBPP (the code subtask).\n"
        "Speedups are over AR: transformers' own generate. Published: A100-80GB, float16, 1,024 new tokens."
    )
    columns = [Column("name", "method", False), Column("source", "figures", False)]
    columns += [Column(name, title) for name, title in TABLE1_COLUMNS.items()]
    blocks = []
    for (bench, model), rows in table.groupby(["other_bench", "model"], sort=False):
        devices = [device for device in rows["device"].unique() if device]
        title = f"{model}{f' on {bench}' if bench else ''}"
        title += f" (measured on {'; '.join(devices)})" if devices else ""
        lead = f"Of {bench}'s own questions, by subtask and as a whole: {APART}." if bench else ""
        lines = [Line(_table1_cells(row), str(row["method"])) for row in rows.to_dict("records")]
        blocks.append(Block(columns, lines, title, lead, str(bench), str(model)))
    return View(blocks, "Table 1", [head], list(footnotes))


def _table1_cells(row: dict[Any, Any]) -> list[Cell]:
    source = str(row["source"])
    if source == MEASURED:  # on what, and how its steps were taken
        source += ": " + "; ".join(word for word in (row["measured"], row["execution"]) if word)
    figures = {name: shown(row[name]) for name in TABLE1_COLUMNS}
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
        out += [f"## {block.title}", *([block.lead] if block.lead else []), table]
    return "\n\n".join([*out, *view.footnotes]) + "\n"


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Render a table's lines as Markdown, its head first."""
    head = list(columns)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def to_latex(view: View) -> str:
    r"""Render Table 1 with \usepackage{booktabs}: published rows in italics, a tabular more for each other bench."""
    lines = [f"% {note}" for note in view.footnotes]
    lines.append("% needs \\usepackage{booktabs}; published rows are in italics")
    for bench in dict.fromkeys(block.bench for block in view.blocks):
        blocks = [block for block in view.blocks if block.bench == bench]
        titles = [column.title for column in blocks[0].columns[2:]]
        name = _escape(bench)
        heads = (f"{name} ({APART})", f"{name}, code") if name else ("Spec-Bench", "MBPP")
        lines += [
            "\\begin{tabular}{ll" + "r" * len(titles) + "}",
            "\\toprule",
            f" & & \\multicolumn{{9}}{{c}}{{{heads[0]}}} & \\multicolumn{{3}}{{c}}{{{heads[1]}}} \\\\",
            "\\cmidrule(lr){3-11} \\cmidrule(lr){12-14}",
            " & ".join(["Model", "Method", *titles]) + " \\\\",
        ]
        for block in blocks:
            lines.append("\\midrule")
            for i, line in enumerate(block.lines):
                lines.append(" & ".join([_escape(block.model) if i == 0 else "", *_latex_cells(line)]) + " \\\\")
        lines += ["\\bottomrule", "\\end{tabular}", ""]
    return "\n".join(lines)


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


def write_tables(runs: Sequence[Run], folder: Path, notes: Sequence[str] = ()) -> pd.DataFrame:
    """Write main.csv (every digit), main.md (rounded) and what else the runs hold below `folder`.

    Returns:
        The table of what was measured; the files also list what was not available.
    """
    table = with_published(main_table(runs))
    complete = with_unavailable(table, folder.parent)
    write_csv(folder / "main.csv", complete)
    write_text(folder / "main.md", to_markdown(main_view(runs, complete, notes)))
    depths, memory = depths_table(runs), memory_table(runs)
    if not depths.empty:
        write_csv(folder / "acceptance_by_depth.csv", depths)
        write_csv(folder / "acceptance_by_node.csv", nodes_table(runs))
    if not memory.empty:
        write_csv(folder / "memory.csv", memory)
    greedy = [run for run in runs if not run.facets["temperature"]]  # as the paper's are
    if any(run.label == "hf" for run in greedy):  # without it there is nothing that the paper's speedups are over
        write_table1(greedy, folder, not_available(folder.parent))
    return table


def write_table1(runs: Sequence[Run], folder: Path, left_out: Sequence[dict[str, str]] = ()) -> None:
    """Write table1.csv (every digit), table1.md and table1.tex (booktabs), in the paper's layout."""
    table = table1(runs, left_out)
    view = table1_view(table, caveats.mixed(runs))
    write_csv(folder / "table1.csv", table)
    write_text(folder / "table1.md", to_markdown(view))
    write_text(folder / "table1.tex", to_latex(view))
