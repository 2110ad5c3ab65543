"""Shipped experiments measured again: compared and replaced."""

import pytest

from evaluation import contribute
from evaluation import run as run_module
from evaluation.records import compact
from evaluation.statistics.experiment import Experiment
from tests.evaluation.conftest import call
from tools import document_results, measure_again

__all__ = ["call"]
WORDS = (
    "timed=false",
    "method=vanilla,pld",
    "bench.order=file",
    "bench.per_category=1",
    "max_new_tokens=24",
)


def lengths_of(run):
    return [row["choices"][0]["accept_lengths"] for row in run.answers]


@pytest.mark.slow
def test_what_changed_is_named_and_replaced(call, tmp_path, monkeypatch):
    reference = tmp_path / "results/reference"
    reference.mkdir(parents=True)
    (reference.parent / "README.md").write_text(f"{contribute.BEGIN}{contribute.END}")
    for module in (measure_again, document_results, contribute):
        monkeypatch.setattr(module, "REFERENCE", reference)
    monkeypatch.setattr(measure_again, "AGAIN", tmp_path / "again")
    command = ["experiment=order", *WORDS, "name=small"]
    outcome = call(run_module.main, *command, f"results_dir={tmp_path}")
    assert outcome.code == 0, outcome.err

    file = contribute.contribute(tmp_path / "small", "small") / compact.FILE
    runs = Experiment.read(file.parent).runs
    (pld,) = (run for run in runs if run.label == "pld")
    whole = [[*lengths] for lengths in lengths_of(pld)]
    # as another version of pld would have accepted
    next(lengths for lengths in lengths_of(pld) if lengths != lengths[::-1]).reverse()
    records = []
    for run in runs:
        typed = {"command": ["python", "-m", "evaluation.run", *command]}  # not pytest's
        records.append((run.folder.name, run.metadata | typed, run.answers))
    file.write_bytes(compact.packed(records))

    outcome = call(measure_again.main)
    assert outcome.code == 0, outcome.err
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("small: "))
    assert "equal in 1 of 2 configurations" in line and ": pld" in line
    (pld,) = (run for run in Experiment.read(file.parent).runs if run.label == "pld")
    assert lengths_of(pld) == whole
