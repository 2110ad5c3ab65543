"""A run of a quantised model."""

import json
from importlib.metadata import version
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="optional: pip install torchao"
)


def test_a_run_says_so_and_an_installed_torchao_changes_nothing_of_others(evaluate, tmp_path):
    """transformers imports it where it is; a run that does without goes on where it is not."""
    import torchao  # noqa: F401

    for name, more in (("plain", []), ("int8", ["model.quantize=int8"])):
        outcome = evaluate("model.device=cpu", "bench.per_category=1", f"name={name}", *more)
        assert outcome.code == 0, outcome.err
        (file,) = (tmp_path / "results" / name).rglob("metadata.json")
        metadata = json.loads(file.read_text())
        assert metadata["versions"].get("torchao") == (version("torchao") if more else None)
        assert metadata["settings"]["model"]["quantize"] == (name if more else None)
        page = (tmp_path / "results" / name / "report.html").read_text()
        assert ("float32 with weights in int8 (torchao)" in page) == bool(more)
