"""python -m evaluation.contribute RESULTS NAME: write an experiment's records to
results/reference/NAME, for git.

Tables, figures and the page can be made from these records as from the results. Names of people,
hosts and folders are left out. An unfinished experiment is refused. With --add the other runs of
NAME are kept, so that an experiment can be measured in several sessions. Without arguments: write
results/README.md again.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from model.errors import UserError
from model.files import write_bytes, write_json, write_text

from .errors import user_errors
from .records import compact
from .records.provenance import commit
from .records.rows import read_object
from .report import REFERENCE
from .statistics.agreement import GAPS, read_gaps
from .statistics.experiment import Experiment
from .statistics.rendering import markdown

OF_MARK = ("model", "bench", "method", "not_available")  # fields kept of a job that could not run
HEADING = """# Results that ship

Records that ship, a folder for each experiment; `eval.sh` compares yours with them. All else below `results/` is yours
and not in git. Nothing of this needs a model or a network:

```bash
python -m evaluation.report results/reference/quickstart                                 # tables, figures and page
python -m evaluation.report results/quickstart --against results/reference/quickstart    # do I get the same?
```

How a run on another machine or model gets in: [recipes](../docs/recipes.md#publish-my-results). This file is
written by `python -m evaluation.contribute`.
"""  # noqa: E501


def contribute(folder: Path, name: str, note: str = "", add: bool = False) -> Path:
    """Write an experiment's compact records as results/reference/NAME, and return that folder.

    Args:
        note: a remark for results/README.md, such as the machine.
        add: keep the runs that were contributed earlier and are not in `folder`.

    Raises:
        UserError: `name` is no folder's name, `folder` is unfinished or holds compact records, or
            the earlier records are damaged or missing.
    """
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise UserError(f"{name}: must be one folder's name of letters, digits, dots and dashes")
    if (folder / compact.FILE).is_file():
        raise UserError(f"{folder}: holds compact records already; name a folder of results")
    experiment = Experiment.read(folder)
    if lacking := unfinished(experiment, folder):
        raise UserError(f"{folder}: {lacking}")

    records = []
    for run in experiment.runs:
        metadata = run.metadata | {"summary": run.summary, "note": note}
        records.append((run.folder.name, metadata, run.answers))

    marks = {}
    for path in folder.glob("jobs/*.json"):
        mark = read_object(path)
        if "not_available" in mark:
            marks[path.name] = compact.without_paths({key: mark[key] for key in OF_MARK})

    target = REFERENCE / name
    gaps = read_gaps(folder)

    if add:
        names = {compact.published_name(run) for run, _, _ in records}
        earlier = compact.unpacked(target / compact.FILE)
        records = [run for run in earlier if run[0] not in names] + records
        gaps = read_gaps(target) | gaps

    write_bytes(target / compact.FILE, compact.packed(records))
    # files of earlier records
    earlier_marks = [] if add else target.glob("jobs/*.json")
    for old in [*earlier_marks, *target.glob(GAPS)]:
        old.unlink()
    for file, mark in marks.items():
        write_json(target / "jobs" / file, mark)
    if gaps:
        entries = []
        for (name_of_run, *place), gap in gaps.items():
            entries.append({"at": [compact.published_name(name_of_run), *place], "gap": gap})
        write_json(target / GAPS, entries)

    return target


def unfinished(experiment: Experiment, folder: Path) -> str:
    """Say what an experiment lacks; empty if it is finished."""
    if experiment.missing:
        return experiment.missing
    runs = experiment.runs
    read = {run.folder for run in runs}
    cut = [run for run in runs if not run.complete or not run.summary]

    for path in sorted(folder.glob("runs/*")):
        if path.is_dir() and path not in read:
            return f"runs/{path.name} has no answers that this version reads"

    if cut:
        answers = f"{len(cut[0].answers)} of {cut[0].metadata['questions']} answers"
        return (
            f"{len(cut)} of {len(runs)} runs are not finished"
            f" (runs/{cut[0].folder.name}: {answers})"
        )

    return ""


def overview(folder: Path) -> str:
    """Return results/README.md, made from the records.

    It lists each folder's models, benches, devices and dates.
    """
    rows = []
    for path in sorted(folder.glob(f"*/{compact.FILE}")):
        experiment = Experiment.read(path.parent)
        pooled = experiment.pools
        metadata = [run.metadata for run in experiment.runs]
        days = sorted(str(m["started"])[:10] for m in metadata if m.get("started"))
        row = {
            "folder": [f"`{path.parent.name}`"],
            "model": [f"{pool.group['model']} ({pool.group['dtype']})" for pool in pooled],
            "bench, questions": [f"{pool.group['bench']}, {pool.questions}" for pool in pooled],
            "configurations, runs": [f"{len(pooled)}, {len(metadata)}"],
            "device": [m["device"] for m in metadata],
            "started": [" to ".join(dict.fromkeys([*days[:1], *days[-1:]]))],
            "torch, transformers": [
                f"{m['versions']['torch']}, {m['versions']['transformers']}" for m in metadata
            ],
            "code": map(commit, metadata),
            "KiB": [f"{path.stat().st_size / 2**10:.0f}"],
            "note": [m.get("note", "") for m in metadata],
        }
        rows.append({k: "; ".join(dict.fromkeys(filter(None, v))) for k, v in row.items()})

    return f"{HEADING}\n{markdown(rows[0], (row.values() for row in rows))}\n" if rows else HEADING


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.contribute", description=__doc__)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="RESULTS",
        help="an experiment's results",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="of the folder: the experiment, or EXPERIMENT-MACHINE",
    )
    parser.add_argument("--note", default="", help="a remark for results/README.md")
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the runs of NAME that RESULTS has not",
    )

    with user_errors():
        given = parser.parse_args()
        if given.folder and not given.name:
            raise UserError(
                "name the folder below results/reference, such as the experiment's own name"
            )

        if given.folder:
            file = contribute(given.folder, given.name, given.note, given.add) / compact.FILE
            print(f"{file}: {file.stat().st_size / 2**10:.0f} KiB")

        write_text(REFERENCE.parent / "README.md", overview(REFERENCE))
        print(f"{REFERENCE.parent / 'README.md'}: written")


if __name__ == "__main__":
    main()
