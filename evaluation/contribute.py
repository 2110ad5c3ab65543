"""python -m evaluation.contribute RESULTS NAME: copy an experiment's records, as one file without
text and paths, to results/reference/NAME, for git.

An unfinished experiment is refused. Afterwards, python -m tools.document_results writes the table
of results/README.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from model.errors import Parser, UserError
from model.files import local_path, write_bytes, write_json

from .errors import user_errors
from .records import compact
from .report import REFERENCE
from .statistics.agreement import GAPS, read_gaps
from .tables import notes
from .tables.experiment import Experiment


def contribute(folder: Path, name: str, note: str = "") -> Path:
    """Write compact records as results/reference/NAME, and return their file.

    Raises UserError if `name` is no folder's name or taken, or `folder` is unfinished.
    """
    target = REFERENCE / name
    file = target / compact.FILE  # written last, so that a folder with it is whole
    if not re.fullmatch(r"\w[\w.-]*", name) or file.exists():
        raise UserError(f"{file}: must be new, in a folder of letters, digits, dots and dashes")
    experiment = Experiment.read(folder)
    if lacking := experiment.missing or "; ".join(notes.incomplete(experiment.runs)):
        raise UserError(f"{folder}: {lacking}")

    gaps = []
    for (run_name, *place), gap in read_gaps(folder).items():
        gaps.append({"at": [compact.published_name(run_name), *place], "gap": gap})
    if gaps:
        write_json(target / GAPS, gaps)

    records = []
    for run in experiment.runs:
        metadata = run.metadata | {"summary": run.summary, "note": note}
        records.append((run.folder.name, metadata, run.answers))
    write_bytes(file, compact.packed(records))
    return file


def main() -> None:
    parser = Parser(prog="python -m evaluation.contribute", description=__doc__)
    parser.add_argument("folder", type=local_path, metavar="RESULTS")
    parser.add_argument("name", metavar="NAME", help="EXPERIMENT or EXPERIMENT-MACHINE")
    parser.add_argument("--note", default="", help="a remark for results/README.md")
    with user_errors():
        file = contribute(**vars(parser.parse_args()))
        print(f"{file}: {file.stat().st_size / 2**10:.0f} KiB")


if __name__ == "__main__":
    main()
