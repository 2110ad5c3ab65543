"""python -m evaluation.report FOLDER: rebuild tables, figures and page of an experiment from its
records.

With --answers GLOB instead of a folder: the same table from answer files in Spec-Bench's format, of
any method. With --against OTHER: compare token ids and accepted lengths with another folder's. Exit
code 1 if token ids differ.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Sequence
from glob import escape
from pathlib import Path

from model.errors import Parser, UserError
from model.files import ROOT, local_path, write_json, write_text

from .errors import user_errors
from .figures import draw_all
from .page import write_page
from .records.compact import FILE
from .records.provenance import sha256_of
from .records.runs import read_foreign
from .statistics import notes
from .statistics.agreement import EQUAL, TEXT, Comparison, compare
from .statistics.experiment import Experiment
from .statistics.latex import main_latex
from .statistics.metrics import OVERALL, grouped
from .statistics.published import WHOLE
from .statistics.rendering import (
    aligned,
    interval_text,
    main_view,
    to_markdown,
    to_text,
    write_audit,
    write_csv,
)
from .statistics.table1 import write_table1
from .statistics.tables import depths_table

MANIFEST = "manifest.json"  # the tables' SHA-256
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
    print(f"tables:  {folder / 'tables' / 'main.csv'} (by subtask; also .md, .tex, .json)")
    print(f"figures: {folder / 'figures'} ({len(figures)}, each as pdf, svg, png)")
    print(against_shipped(experiment, folder), end="")
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
    write_text(folder / "main.json", table.to_json(orient="records", indent=1) + "\n")

    depths = depths_table(experiment.pools)
    if not depths.empty:
        write_csv(folder / "acceptance_by_depth.csv", depths)

    # as the paper's: greedy, on its benches, with the baseline of its speedups
    paper = table[(table["temperature"] == 0.0) & table["bench"].isin(WHOLE)]
    if (paper["method"] == "hf").any():
        warnings = notes.mixed(experiment.runs) + notes.doubts(experiment.pools)
        write_table1(paper, folder, [*experiment.not_available, *warnings])

    audit = write_audit(experiment, folder)
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    write_json(folder / MANIFEST, {path.name: sha256_of(path) for path in files})
    return audit


def report_answers(pattern: str, out: Path, baseline: Path | None = None) -> None:
    """Write the main table of answer files of any origin, as CSV and Markdown, and print it."""
    experiment = Experiment(read_foreign(pattern, baseline))
    write_csv(out, experiment.table)
    write_text(out.with_suffix(".md"), to_markdown(main_view(experiment)))
    print("\n" + to_text(main_view(experiment, OVERALL)))
    print(f"\ntables:  {out} (by subtask; also .md)")


def against(folder: Path, other: Path) -> list[Comparison]:
    """Compare an experiment's token ids and accepted lengths with another's.

    The comparisons are printed and returned.

    Raises:
        UserError: they have no configuration in common on the same questions.
    """
    comparisons, alone = compare(Experiment.read(folder).pools, Experiment.read(other).pools)
    if not comparisons:
        raise UserError(f"{folder}: no configuration that {other} has, too, on the same questions")
    print(f"\n{folder} against {other}:")
    print("\n".join([*in_words(comparisons), *alone, f"{summary(comparisons)}."]))
    return comparisons


def in_words(comparisons: Sequence[Comparison]) -> list[str]:
    """Format the comparisons: a table, then where each configuration first differs."""
    rows = [["method", "questions", "same text", "same lengths", "mat", "mat there", "ratio"]]
    for c in comparisons:
        ratio, low, high = c.ratio
        interval = f" {interval_text(low, high)}" if math.isfinite(low) else ""
        counts = map(str, (c.questions, c.same_text, c.same_lengths))
        mats = (f"{mat:.2f}" for mat in c.mats)
        rows.append([c.name, *counts, *mats, f"{ratio:.3f}{interval}"])

    differing = [c for c in comparisons if c.first]
    return aligned(rows) + [f"{c.name}: {c.verdict}; {c.first}" for c in differing]


def summary(comparisons: Sequence[Comparison]) -> str:
    """Say in one line how far two experiments agree."""
    verdicts = grouped(comparisons, lambda c: c.verdict)
    equal = f"{len(verdicts.pop(EQUAL, []))} of {len(comparisons)} configurations"
    questions = " or ".join(map(str, sorted({c.questions for c in comparisons})))
    words = [f"token ids and accepted lengths equal in {equal} on {questions} questions"]
    for verdict, same in verdicts.items():
        words.append(f"{verdict}: {', '.join(c.name for c in same)}")
    return "; ".join(words)


def against_shipped(experiment: Experiment, folder: Path) -> str:
    """Say in one line how an experiment agrees with the shipped one of its name.

    Of several shipped ones whose names begin so (headline, headline-intel), the one with most
    configurations in common counts. The text is empty if there is none to compare.
    """
    if folder.resolve().parent == REFERENCE:
        return ""
    folders = [path.parent for path in REFERENCE.glob(f"{escape(folder.resolve().name)}*/{FILE}")]
    compared = {}
    for shipped in sorted(folders):
        compared[shipped], _ = compare(experiment.pools, Experiment.read(shipped).pools)

    closest = max(compared, key=lambda shipped: len(compared[shipped]), default=folder)
    most = compared.get(closest)
    if not most:
        return ""

    closest = Path(os.path.relpath(closest))
    words = f"against {closest}: {summary(most)}"
    if all(c.verdict == EQUAL for c in most):
        return f"{words}\n"
    again = ["python", "-m", "evaluation.report", str(folder), "--against", str(closest)]
    return f"{words}; more: {shlex.join(again)}\n"


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
        given = parser.parse_args()
        if (given.folder is None) == (given.answers is None):
            raise UserError("name an experiment's folder, or answer files with --answers GLOB")
        if given.answers and given.against:
            raise UserError("--against: with an experiment's folder only")
        if given.folder and (given.out or given.baseline):
            raise UserError("--out, --baseline: with --answers only")

        if given.answers:
            report_answers(given.answers, given.out or FOREIGN, given.baseline)
        elif given.against:
            comparisons = against(given.folder, given.against)
            sys.exit(int(any(c.verdict == TEXT for c in comparisons)))
        else:
            report(given.folder)


if __name__ == "__main__":
    main()
