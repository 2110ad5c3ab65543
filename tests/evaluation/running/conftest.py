"""What runs have in common; a server that answers with the toy model's tokens."""

from pathlib import Path

import pytest

from evaluation.records.runs import read_runs
from tests.evaluation.running.fake_engine import FakeEngine

CORE = ("turns", "new_tokens", "accept_lengths", "output_ids", "step_paths", "stop")


def core(rows):
    """What must repeat: everything but times and random ids."""
    return [
        (row["question_id"], [[choice[key] for key in CORE] for choice in row["choices"]])
        for row in rows
    ]


def records(folder: Path) -> dict:
    """What must repeat of each run, by label and repeat; the same for all runs of one label."""
    found: dict = {}
    for run in read_runs(folder):
        answers = core(run.answers)
        assert found.setdefault((run.label, run.settings["repeat"]), answers) == answers
    return found


def states(folder: Path) -> dict:
    """The saved states, by the readable part of their runs' folders."""
    paths = folder.glob("runs/*/state.safetensors")
    return {path.parent.name.rpartition("-")[0]: path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def plain(checkpoint):
    return FakeEngine(checkpoint)


@pytest.fixture
def engine(plain):
    """Without speculation and faults."""
    plain.reset()
    return plain


@pytest.fixture(scope="module")
def drafting(checkpoint):
    return FakeEngine(checkpoint, drafting=True)


@pytest.fixture
def served(evaluate):
    """A run of method=server, untyped settings by the fixture `evaluate`."""

    def running(engine, *words, name="served"):
        url = engine if isinstance(engine, str) else engine.url
        return evaluate("method=server", f"method.url={url}", f"name={name}", "timed=true", *words)

    return running
