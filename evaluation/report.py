"""python -m evaluation.report FOLDER: tables and figures of an experiment again, from its records alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from .cli import user_errors
from .figures import draw_all
from .page import write_page
from .tables import read_runs, to_text, write_tables


def report(folder: Path) -> None:
    """Write `tables/` and `figures/` below an experiment's folder and print the overall table."""
    runs = read_runs(folder)
    table = write_tables(runs, folder / "tables")
    figures = draw_all(runs, table, folder / "figures")
    print(f"\n{to_text(runs, table)}\n")
    print(
        f"by category: {folder / 'tables' / 'main.csv'} (and .md)   "
        f"figures: {folder / 'figures'} ({len(figures)} as png and svg)   "
        f"page: {write_page(runs, table, folder)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evaluation.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="an experiment's results, e.g. results/quickstart")
    arguments = parser.parse_args()
    with user_errors():
        report(arguments.folder)


if __name__ == "__main__":
    main()
