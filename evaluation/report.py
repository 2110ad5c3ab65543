"""python -m evaluation.report FOLDER: rebuild tables, figures and page of an experiment from its
records.

With --answers GLOB instead of a folder: the same table from answer files in Spec-Bench's format, of
any method. With --against OTHER: compare token ids and accepted lengths with another folder's. Exit
code 1 if token ids differ; rows of 16-bit numbers or of a server are named only.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from model.errors import UserError
from model.files import ROOT, write_text

from .errors import user_errors
from .figures import draw_all
from .page import write_page
from .records.compact import FILE
from .records.runs import read_foreign
from .statistics.agreement import EQUAL, TEXT, Comparison, compare
from .statistics.experiment import Experiment
from .statistics.metrics import OVERALL, grouped
from .statistics.notes import auto_lines, headlines
from .statistics.rendering import (
    aligned,
    interval_text,
    main_view,
    shown,
    to_markdown,
    to_text,
    write_csv,
    write_tables,
)

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
    view = main_view(experiment, category=OVERALL)
    print("\n".join(["", *headlines(experiment.table), "", to_text(view), ""]))
    for line in filter(None, [*auto_lines(experiment.pools), *audit, experiment.missing]):
        print(line)
    print(f"\nreport:  {page}\ntables:  {folder / 'tables' / 'main.csv'} (by subtask; also .md)")
    print(f"figures: {folder / 'figures'} ({len(figures)}, each as pdf, svg, png)")
    if line := against_shipped(experiment, folder):
        print(line)
    return experiment


def report_answers(pattern: str, out: Path, baseline: Path | None = None) -> None:
    """Write the main table of answer files of any origin, as CSV and Markdown, and print it."""
    experiment = Experiment(read_foreign(pattern, baseline))
    write_csv(out, experiment.table)
    write_text(out.with_suffix(".md"), to_markdown(main_view(experiment)))
    print(
        f"\n{to_text(main_view(experiment, category=OVERALL))}\n\ntables:  {out} (by subtask; also"
        " .md)"
    )


def against(folder: Path, other: Path) -> list[Comparison]:
    """Compare an experiment's token ids and accepted lengths with another's.

    The comparisons are printed and returned.

    Raises:
        UserError: they have no configuration in common on the same questions.
    """
    comparisons, alone = compare(Experiment.read(folder).pools, Experiment.read(other).pools)
    if not comparisons:
        raise UserError(f"{folder}: no configuration that {other} has, too, on the same questions")
    heading = f"\n{folder} against {other}:"
    print("\n".join([heading, *in_words(comparisons), *alone, f"{summary(comparisons)}."]))
    return comparisons


def in_words(comparisons: Sequence[Comparison]) -> list[str]:
    """Format the comparisons: a table, then where each configuration first differs."""
    rows = [["method", "questions", "same text", "same lengths", "mat", "mat there", "ratio"]]
    for c in comparisons:
        interval = f" {interval_text(*c.ratio[1:])}" if math.isfinite(c.ratio[1]) else ""
        counts = (shown(count) for count in (c.questions, c.same_text, c.same_lengths))
        mats = (f"{mat:.2f}" for mat in c.mats)
        rows.append([c.name, *counts, *mats, f"{c.ratio[0]:.3f}{interval}"])

    verdicts = ["", *(f"  {c.verdict}" for c in comparisons)]
    table = [row + verdict for row, verdict in zip(aligned(rows), verdicts, strict=True)]
    return table + [f"{c.name}: {c.first}" for c in comparisons if c.first]


def summary(comparisons: Sequence[Comparison]) -> str:
    """Say in one line how far two experiments agree."""
    verdicts = grouped(comparisons, lambda c: c.verdict)
    questions = " or ".join(map(str, sorted({c.questions for c in comparisons})))
    equal = f"{len(verdicts.pop(EQUAL, []))} of {len(comparisons)} configurations"
    words = [f"token ids and accepted lengths equal in {equal} on {questions} questions"]
    for verdict, same in verdicts.items():
        words.append(f"{verdict}: {', '.join(c.name for c in same)}")
    return "; ".join(words)


def against_shipped(experiment: Experiment, folder: Path) -> str:
    """Say in one line how an experiment agrees with a shipped one.

    The text is empty if there is none to compare.

    Candidates are shipped experiments whose name begins with the same word (start: start-embedded).
    The one with most configurations in common is compared. Ties go to the same limit of new tokens,
    then to the same name.
    """
    if folder.resolve().parent == REFERENCE:
        return ""
    compared = list[tuple[list[Comparison], Path]]()
    kind = folder.name.partition("-")[0]
    folders = [path.parent for path in REFERENCE.glob(f"*/{FILE}")]
    peers = [path for path in folders if path.name.partition("-")[0] == kind]

    # ties: its own name
    for shipped in sorted(peers, key=lambda path: (path.name != folder.name, path.name)):
        # as typed here
        where = shipped.relative_to(Path.cwd()) if shipped.is_relative_to(Path.cwd()) else shipped
        try:
            compared.append((compare(experiment.pools, Experiment.read(shipped).pools)[0], where))
        except UserError as error:  # the user's own report does not depend on it
            return f"not compared with {where}: {error}"

    def likeness(pair: tuple[list[Comparison], Path]) -> tuple[int, int]:
        return len(pair[0]), sum(c.same_lengths is not None for c in pair[0])

    comparisons, closest = max(compared, key=likeness, default=([], folder))
    if not comparisons:
        return ""
    again = shlex.join(
        ["python", "-m", "evaluation.report", str(folder), "--against", str(closest)]
    )
    more = "" if all(c.verdict == EQUAL for c in comparisons) else f"; more: {again}"
    return f"against {closest}: {summary(comparisons)}{more}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.report", description=__doc__)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help="results, e.g. results/quickstart",
    )
    parser.add_argument(
        "--answers",
        metavar="GLOB",
        help="answer files instead, e.g. 'model_answer/*.jsonl'",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="--answers: the file of plain decoding",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=f"--answers: the table's file (default: {FOREIGN})",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="OTHER",
        help="another folder: are token ids the same?",
    )

    with user_errors():
        arguments = parser.parse_args()
        folder: Path | None = arguments.folder
        if (folder is None) == (arguments.answers is None):
            raise UserError("name an experiment's folder, or answer files with --answers GLOB")
        where = "with --answers" if folder else "with an experiment's folder"
        for option in ("out", "baseline") if folder else ("against",):
            if getattr(arguments, option) is not None:
                raise UserError(f"--{option}: {where} only")

        if folder is None:
            report_answers(arguments.answers, arguments.out or FOREIGN, arguments.baseline)
        elif arguments.against is not None:
            sys.exit(int(any(c.verdict == TEXT for c in against(folder, arguments.against))))
        else:
            report(folder)


if __name__ == "__main__":
    main()
