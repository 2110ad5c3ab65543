"""python -m evaluation.report FOLDER: rebuild tables, figures and page of an experiment from its
records.

With --answers GLOB instead of a folder: the same table from answer files in Spec-Bench's format, of
any method. With --against OTHER: compare token ids and accepted lengths with another folder's. Exit
code 1 if token ids differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

from model.errors import Parser, UserError
from model.files import ROOT, local_path, write_text

from .errors import user_errors
from .figures import draw_all
from .page import write_page
from .records.compact import FILE
from .records.runs import read_foreign
from .statistics.agreement import EQUAL, TEXT, compared
from .statistics.metrics import OVERALL
from .statistics.published import WHOLE
from .tables import notes
from .tables.experiment import Experiment
from .tables.latex import main_latex
from .tables.rendering import main_view, to_markdown, to_text, write_audit, write_csv
from .tables.table1 import write_table1
from .tables.tables import depths_table

FOREIGN = Path("results/report/tables/main.csv")
REFERENCE = ROOT / "results" / "reference"  # shipped records, one folder per experiment


def report(folder: Path) -> Experiment:
    """Write `tables/`, `figures/` and `report.html` below an experiment's folder.

    Print the overall table.
    """
    experiment = Experiment.read(folder)
    audit = write_tables(experiment, folder / "tables")
    figures = draw_all(experiment, folder / "figures")
    page = write_page(experiment, folder)

    print("\n".join(["", *notes.headlines(experiment.table, experiment.pools), ""]))
    print(to_text(main_view(experiment, OVERALL)) + "\n")
    pools = experiment.pools
    lines = [*notes.gains(pools), *notes.auto_lines(pools), *audit, experiment.missing]
    print("".join(f"{line}\n" for line in lines if line))
    print(f"report:  {page}")
    print(f"tables:  {folder / 'tables' / 'main.csv'} (by subtask; also .md, .tex)")
    print(f"figures: {folder / 'figures'} ({len(figures)}, each as pdf, svg, png)")
    shipped = REFERENCE / folder.resolve().name
    if (shipped / FILE).exists() and shipped != folder.resolve():
        line, _ = against(experiment, shipped)
        print(line, end="\n" if line else "")
    return experiment


def write_tables(experiment: Experiment, folder: Path) -> list[str]:
    """Write main.csv (every digit), main.md (rounded) and the other tables that the runs give.

    Returns:
        The audit in words.
    """
    table = experiment.table
    write_csv(folder / "main.csv", table)
    write_text(folder / "main.md", to_markdown(main_view(experiment)))
    write_text(folder / "main.tex", main_latex(experiment))

    depths = depths_table(experiment.pools)
    if not depths.empty:
        write_csv(folder / "acceptance_by_depth.csv", depths)

    # as the paper's: greedy, on its benches, with the baseline of its speedups
    paper = table[(table["temperature"] == 0.0) & table["bench"].isin(WHOLE)]
    if (paper["method"] == "hf").any():
        warnings = notes.mixed(experiment.runs) + notes.doubts(experiment.pools)
        write_table1(paper, folder, [*experiment.not_available, *warnings])

    return write_audit(experiment, folder)


def report_answers(pattern: str, out: Path, baseline: Path | None = None) -> None:
    """Write the main table of answer files of any origin, as CSV and Markdown, and print it."""
    experiment = Experiment(read_foreign(pattern, baseline))
    write_csv(out, experiment.table)
    write_text(out.with_suffix(".md"), to_markdown(main_view(experiment)))
    print("\n" + to_text(main_view(experiment, OVERALL)))
    print(f"\ntables:  {out} (by subtask; also .md)")


def against(experiment: Experiment, other: Path) -> tuple[str, bool]:
    """Say in one line how far an experiment's answers equal another folder's.

    Returns:
        The line, empty without a common configuration, and whether one has another text.
    """
    verdicts = compared(experiment.pools, Experiment.read(other).pools)
    if not verdicts:
        return "", False
    total = sum(map(len, verdicts.values()))
    equal = len(verdicts.pop(EQUAL, []))
    words = f"token ids and accepted lengths equal in {equal} of {total} configurations"
    for verdict, names in verdicts.items():
        words += f"; {verdict}: {', '.join(names)}"
    return f"against {other}: {words}", TEXT in verdicts


def main() -> None:
    """The command line."""
    parser = Parser(prog="python -m evaluation.report", description=__doc__)
    parser.add_argument(
        "folder",
        type=local_path,
        nargs="?",
        metavar="FOLDER",
        help="results, e.g. results/quickstart",
    )
    parser.add_argument(
        "--answers", metavar="GLOB", help="answer files instead, e.g. 'model_answer/*.jsonl'"
    )
    parser.add_argument(
        "--baseline", type=local_path, metavar="FILE", help="--answers: the file of plain decoding"
    )
    parser.add_argument(
        "--out", type=local_path, help=f"--answers: the table's file (default: {FOREIGN})"
    )
    parser.add_argument(
        "--against",
        type=local_path,
        metavar="OTHER",
        help="another folder: are token ids the same?",
    )

    with user_errors():
        options = parser.parse_args()
        if (options.folder is None) == (options.answers is None):
            raise UserError("name an experiment's folder, or answer files with --answers GLOB")
        if options.answers and options.against:
            raise UserError("--against: with an experiment's folder only")
        if options.folder and (options.out or options.baseline):
            raise UserError("--out, --baseline: with --answers only")

        if options.answers:
            report_answers(options.answers, options.out or FOREIGN, options.baseline)
        elif options.against:
            line, differs = against(Experiment.read(options.folder), options.against)
            if not line:
                raise UserError(
                    f"{options.against}: has no configuration in common with the folder"
                )
            print(line)
            sys.exit(int(differs))
        else:
            report(options.folder)


if __name__ == "__main__":
    main()
