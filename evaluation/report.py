"""python -m evaluation.report FOLDER: rebuild tables, figures and page of an experiment from its records.

With --answers GLOB instead of a folder: the same table from answer files in Spec-Bench's format, of any method.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import pandas as pd

from model.errors import UserError
from model.files import write_text

from .errors import user_errors
from .figures import draw_all
from .page import write_page
from .records.runs import Run, read_foreign, read_runs
from .records.sweeps import missing_jobs
from .statistics.audits import write_audit
from .statistics.caveats import doubts
from .statistics.exports import write_parquet
from .statistics.metrics import OVERALL
from .statistics.published import with_published
from .statistics.tables import main_table, with_unavailable
from .statistics.trees import auto_lines, write_auto_runs
from .statistics.view import main_view, to_markdown, to_text, wrapped, write_csv, write_tables

FOREIGN = Path("results/report/tables/main.csv")


def report(folder: Path, parquet: Path | None = None) -> tuple[list[Run], pd.DataFrame]:
    """Write `tables/` and `figures/` below an experiment's folder and print the overall table.

    Args:
        parquet: a folder for the table, and for every turn, in Parquet.

    Returns:
        The runs and their table.
    """
    runs = read_runs(folder)
    missing = missing_jobs(folder)
    notes = [str(missing)] if missing else []
    table = write_tables(runs, folder / "tables", notes)
    audit = write_audit(runs, folder)
    figures = draw_all(runs, table, folder / "figures")
    write_auto_runs(runs, folder / "tables" / "machine_tree.json")
    page, width = write_page(runs, table, folder), _width()
    print(f"\n{to_text(main_view(runs, with_unavailable(table, folder), category=OVERALL), width)}\n")
    for line in [*auto_lines(runs), *audit, *doubts(runs), *notes]:
        print(wrapped(line, width))
    print(f"\nreport:  {page}\ntables:  {folder / 'tables' / 'main.csv'} (by subtask; also .md)")
    print(f"figures: {folder / 'figures'} ({len(figures)}, each as pdf, svg, png)")
    if parquet is not None:
        print(f"parquet: {', '.join(map(str, write_parquet(runs, table, parquet)))}")
    return runs, table


def report_answers(pattern: str, out: Path) -> None:
    """Write the main table of answer files of any origin, as CSV and Markdown, and print it."""
    runs = read_foreign(pattern)
    table = with_published(main_table(runs))
    write_csv(out, table)
    write_text(out.with_suffix(".md"), to_markdown(main_view(runs, table)))
    text = to_text(main_view(runs, table, category=OVERALL), _width())
    print(f"\n{text}\n\ntables:  {out} (by subtask; also .md)")


def _width() -> int | None:
    """Return the width of the terminal; None where the output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evaluation.report", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="an experiment's results, e.g. results/quickstart")
    parser.add_argument("--answers", metavar="GLOB", help="answer files instead, e.g. 'model_answer/*.jsonl'")
    parser.add_argument("--out", type=Path, help=f"with --answers: the table's file (default {FOREIGN})")
    parser.add_argument("--parquet", type=Path, metavar="DIR", help="also the table and every turn in Parquet")
    arguments = parser.parse_args()
    with user_errors():
        if (arguments.folder is None) == (arguments.answers is None):
            raise UserError("name an experiment's folder, or answer files with --answers GLOB")
        if arguments.answers is not None and arguments.parquet is not None:
            raise UserError("--parquet: with an experiment's folder only")
        if arguments.answers is not None:
            report_answers(arguments.answers, arguments.out or FOREIGN)
        elif arguments.out is not None:
            raise UserError("--out: with --answers only; an experiment's report lies in its folder")
        else:
            report(arguments.folder, arguments.parquet)


if __name__ == "__main__":
    main()
