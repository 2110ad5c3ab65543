"""A run of a quantised model."""

from importlib.util import find_spec

import pytest

from tests.evaluation.conftest import answers_in

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(find_spec("torchao") is None, reason="optional: requirements-extras.txt"),
]


def test_a_run_says_so(evaluate, tmp_path):
    outcome = evaluate("model.quantize=int8", "model.device=cpu", "bench.per_category=1")
    assert outcome.code == 0, outcome.err
    rows = answers_in(tmp_path)
    assert len(rows) == 6
    (page,) = (tmp_path / "results").rglob("report.html")
    assert "float32 with weights in int8 (torchao)" in page.read_text()
