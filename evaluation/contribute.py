"""python -m evaluation.contribute RESULTS NAME: write an experiment's records to
results/reference/NAME, for git.

Tables, figures and the page can be made from these records as from the results. Names of people,
hosts and folders are left out. An unfinished experiment is refused. Without arguments: write
the table of results/README.md again.
"""

from __future__ import annotations

import re
from pathlib import Path

from model.errors import Parser, UserError
from model.files import local_path, write_bytes, write_json, write_text

from .errors import user_errors
from .records import compact
from .records.provenance import commit
from .report import REFERENCE
from .statistics import notes
from .statistics.agreement import GAPS, read_gaps
from .statistics.experiment import Experiment
from .statistics.rendering import markdown

# results/README.md: the table of records stands between these
BEGIN = "<!-- records -->\n"
END = "<!-- end -->"


def contribute(
    folder: Path, name: str, note: str = "", *, replace: bool = False, why: str = ""
) -> Path:
    """Write an experiment's compact records as results/reference/NAME, and return that folder.

    Args:
        note: a remark for results/README.md, such as the machine.
        replace: write over the records that have this name.
        why: doubtful timings are recorded, for this reason, which is added to the note.

    Raises:
        UserError: `name` is no folder's name or taken, or `folder` is unfinished or its timings are
            doubtful.
    """
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise UserError(f"{name}: must be one folder's name of letters, digits, dots and dashes")
    target = REFERENCE / name
    if target.exists() and not replace:
        raise UserError(f"{target}: holds records already; use another NAME, or --replace")
    experiment = Experiment.read(folder)
    if lacking := unfinished(experiment):
        raise UserError(f"{folder}: {lacking}")
    for doubt in notes.doubts(experiment.pools):
        if not why:
            raise UserError(f"{folder}: {doubt}; measure again, or say why not with --doubtful WHY")
        note = f"{note}; timings are doubtful: {why}".removeprefix("; ")

    records = []
    for run in experiment.runs:
        metadata = run.metadata | {"summary": run.summary, "note": note}
        records.append((run.folder.name, metadata, run.answers))
    write_bytes(target / compact.FILE, compact.packed(records))

    (target / GAPS).unlink(missing_ok=True)  # of earlier records
    entries = []
    for (run_name, *place), gap in read_gaps(folder).items():
        entries.append({"at": [compact.published_name(run_name), *place], "gap": gap})
    if entries:
        write_json(target / GAPS, entries)
    return target


def unfinished(experiment: Experiment) -> str:
    """Say what an experiment lacks; empty if it is finished."""
    if experiment.missing:
        return experiment.missing
    runs = experiment.runs
    unfinished = [run for run in runs if not run.complete or not run.summary]
    if not unfinished:
        return ""
    first = unfinished[0]
    answers = f"{len(first.answers)} of {first.metadata['questions']} answers"
    return (
        f"{len(unfinished)} of {len(runs)} runs are not finished"
        f" (runs/{first.folder.name}: {answers})"
    )


def list_records(folder: Path) -> Path:
    """Write the table of README.md beside `folder`, and return that page.

    It lists the models, benches, devices and dates of each of the folder's experiments.
    """
    rows = []
    for path in sorted(folder.glob(f"*/{compact.FILE}")):
        experiment = Experiment.read(path.parent)
        groups = [pool.block for pool in experiment.pools]
        metadata = [run.metadata for run in experiment.runs]
        versions = [run["versions"] for run in metadata]
        days = sorted(str(run["started"])[:10] for run in metadata)
        row = {
            "folder": [f"`{path.parent.name}`"],
            "model": [f"{group['model']} ({group['dtype']})" for group in groups],
            "bench, questions": [f"{g['bench']}, {g['bench_questions']}" for g in groups],
            "configurations, runs": [f"{len(groups)}, {len(metadata)}"],
            "device": [run["device"] for run in metadata],
            "started": [" to ".join(dict.fromkeys([days[0], days[-1]]))],
            "torch, transformers": [f"{v['torch']}, {v['transformers']}" for v in versions],
            "code": map(commit, metadata),
            "KiB": [f"{path.stat().st_size / 2**10:.0f}"],
            "note": [run["note"] for run in metadata],
        }
        rows.append({k: "; ".join(dict.fromkeys(filter(None, v))) for k, v in row.items()})

    page = folder.parent / "README.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    table = markdown(rows[0], (row.values() for row in rows))
    write_text(page, f"{before}{BEGIN}{table}\n{END}{after}")
    return page


def main() -> None:
    """The command line."""
    parser = Parser(prog="python -m evaluation.contribute", description=__doc__)
    parser.add_argument("folder", type=local_path, nargs="?", metavar="RESULTS")
    parser.add_argument("name", nargs="?", metavar="NAME", help="EXPERIMENT or EXPERIMENT-MACHINE")
    parser.add_argument("--note", default="", help="a remark for results/README.md")
    parser.add_argument("--replace", action="store_true", help="write over the records at NAME")
    parser.add_argument(
        "--doubtful",
        default="",
        metavar="WHY",
        help="why doubtful timings are recorded",
        dest="why",
    )

    with user_errors():
        given = parser.parse_args()
        if given.folder and not given.name:
            raise UserError(
                "name the folder below results/reference, such as the experiment's own name"
            )

        if given.folder:
            file = contribute(**vars(given)) / compact.FILE
            print(f"{file}: {file.stat().st_size / 2**10:.0f} KiB")

        print(f"{list_records(REFERENCE)}: written")


if __name__ == "__main__":
    main()
