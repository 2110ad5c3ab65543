"""python -m tools.measure_again [NAMES]: measure shipped experiments again with today's code;
replace their records.

Each runs from its recorded command into results/again; interrupted runs there are resumed. Without
NAMES: all untimed experiments, as their accepted lengths are the same on any machine. Afterwards,
python -m tools.document_results writes the documents.
"""

import argparse
import shlex
import subprocess
import sys
from typing import Any

from evaluation.contribute import contribute, overview
from evaluation.errors import user_errors
from evaluation.records.compact import FILE
from evaluation.records.provenance import commit
from evaluation.records.rows import difference
from evaluation.report import REFERENCE, summary
from evaluation.statistics.agreement import compare
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.rendering import markdown
from model.errors import UserError
from model.files import ROOT, write_text

from .document_results import Shipped

AGAIN = ROOT / "results/again"


def measure_again(name: str) -> tuple[str, str, str]:
    """Run a shipped experiment again and replace its records.

    Returns its name, what differs, and which code made it.

    Raises UserError if its command stops; the shipped records are unchanged then.
    """
    shipped = Shipped(name)
    words = shlex.split(shipped.command)[2:]  # after "bash eval.sh"
    done = subprocess.run(
        [sys.executable, "-m", "evaluation.run", *words, f"results_dir={AGAIN}"], cwd=ROOT
    )
    if done.returncode:
        raise UserError(
            f"{name}: its command stopped with exit code {done.returncode};"
            " the same command goes on"
        )

    here = Experiment.read(AGAIN / name)
    comparisons, alone = compare(here.pools, shipped.experiment.pools)
    commits, machine = made_with(shipped.experiment)
    commits_now, machine_now = made_with(here)
    notes = [run.metadata.get("note") for run in shipped.experiment.runs]
    contribute(AGAIN / name, name, next(filter(None, notes), ""))

    differs = difference(machine, machine_now)
    code = f"{commits} -> {commits_now}{differs and f'; {differs}'}"
    return name, "; ".join([summary(comparisons), *alone]), code


def made_with(experiment: Experiment) -> tuple[str, dict[str, Any]]:
    """Return the commits of an experiment's runs, and the versions and machine of the first."""
    runs = [run.metadata for run in experiment.runs]
    machine = runs[0]["versions"] | {"device": runs[0]["device"]}
    return ", ".join(sorted({commit(run) for run in runs})), machine


def untimed() -> list[str]:
    """Return the names of the shipped experiments that took no times."""
    names = []
    for path in sorted(REFERENCE.glob(f"*/{FILE}")):
        runs = Shipped(path.parent.name).experiment.runs
        if not any(run.settings["timed"] for run in runs):
            names.append(path.parent.name)
    return names


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.measure_again", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAMES", help="folders of results/reference")
    with user_errors("what was measured is kept"):
        names: list[str] = parser.parse_args().names
        for name in names:
            if not (REFERENCE / name / FILE).is_file():
                raise UserError(f"{name}: no such folder of results/reference with records")
        rows = []
        try:
            for name in names or untimed():
                rows.append(measure_again(name))
        finally:  # also if an experiment stopped
            write_text(REFERENCE.parent / "README.md", overview(REFERENCE))
            print(
                markdown(("experiment", "now against shipped", "code, and what else changed"), rows)
            )


if __name__ == "__main__":
    main()
