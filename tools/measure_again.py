"""python -m tools.measure_again [NAMES]: measure shipped experiments again with today's code;
replace their records.

Each runs from its recorded command into results/again; interrupted runs there are resumed. Without
NAMES: all untimed experiments, as their accepted lengths are the same on any machine. Afterwards,
python -m tools.document_results writes the documents.
"""

import shlex
import subprocess
import sys

from evaluation.contribute import contribute, list_records
from evaluation.errors import user_errors
from evaluation.records.compact import FILE
from evaluation.report import REFERENCE, summary
from evaluation.statistics.agreement import compare
from evaluation.statistics.experiment import Experiment
from model.errors import Parser, UserError
from model.files import ROOT

from .document_results import Shipped

AGAIN = ROOT / "results/again"


def measure_again(name: str) -> str:
    """Run a shipped experiment again, replace its records, and say what differs.

    Raises UserError if its command stops; the shipped records are unchanged then.
    """
    shipped = Shipped(name)
    words = shlex.split(shipped.command)[2:]  # after "bash eval.sh"
    command = [sys.executable, "-m", "evaluation.run", *words, f"results_dir={AGAIN}"]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        raise UserError(
            f"{name}: its command stopped with exit code {done.returncode};"
            " the same command goes on"
        )

    here = Experiment.read(AGAIN / name)
    comparisons, alone = compare(here.pools, shipped.experiment.pools)
    note = shipped.experiment.runs[0].metadata["note"]
    contribute(AGAIN / name, name, note, replace=True)
    return "; ".join([summary(comparisons), *alone])


def untimed() -> list[str]:
    """Return the names of the shipped experiments that took no times."""
    names = [path.parent.name for path in sorted(REFERENCE.glob(f"*/{FILE}"))]
    return [name for name in names if not Shipped(name).experiment.runs[0].settings["timed"]]


def main() -> None:
    """The command line."""
    parser = Parser(prog="python -m tools.measure_again", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAMES", help="folders of results/reference")
    with user_errors("what was measured is kept"):
        names: list[str] = parser.parse_args().names
        for name in names:
            if not (REFERENCE / name / FILE).is_file():
                raise UserError(f"{name}: no such folder of results/reference with records")
        for name in names or untimed():
            print(f"{name}: {measure_again(name)}")
            list_records(REFERENCE)


if __name__ == "__main__":
    main()
