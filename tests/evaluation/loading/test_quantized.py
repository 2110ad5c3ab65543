"""A run of a quantised model."""

import json
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from tests.evaluation.conftest import answers_in

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="optional: pip install torchao")


def test_a_run_says_so(evaluate, tmp_path):
    outcome = evaluate("model.quantize=int8", "model.device=cpu", "bench.per_category=1")
    assert outcome.code == 0, outcome.err
    rows = answers_in(tmp_path)
    assert len(rows) == 6
    (page,) = (tmp_path / "results").rglob("report.html")
    assert "float32 with weights in int8 (torchao)" in page.read_text()


def test_an_installed_torchao_changes_nothing_of_other_runs(evaluate, tmp_path):
    """transformers imports it where it is; a run that does without goes on where it is not."""
    import torchao  # noqa: F401

    assert evaluate("bench.per_category=1").code == 0
    (metadata,) = (tmp_path / "results").rglob("metadata.json")
    held = json.loads(metadata.read_text())
    assert "torchao" not in held["versions"] and held["settings"]["model"]["quantize"] is None
    assert evaluate("bench.per_category=1", "model.quantize=int8", "name=own").code == 0
    (metadata,) = (tmp_path / "results/own").rglob("metadata.json")
    assert json.loads(metadata.read_text())["versions"]["torchao"] == version("torchao")
