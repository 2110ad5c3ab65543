"""A command given again: a finished run is only read, one cut at any point gets what it would have had."""

import json
from pathlib import Path

import pytest

from evaluation.running import runner as session

FEW = ("bench.end=2", "max_new_tokens=16")
KINDS = {
    "auto": ("method=recycling", "tree=auto", "tree.nodes=8"),
    "ngram_cache": ("method=ngram_cache",),
    "spine": ("method=spine", "method.history_tokens=1000"),
    "hf": ("method=hf",),
}


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize(("kind", "start"), [*((kind, "hot") for kind in KINDS), ("spine", "cold")])
def test_a_finished_run_is_left_alone_and_a_lost_summary_is_made_again(
    evaluate, tmp_path, monkeypatch, kind, start
):
    """It was summarised anew with a reset drafter: tree=auto lost its choice, ngram_cache its size, spine its text."""
    folder = tmp_path / "run"
    command = (*KINDS[kind], f"start={start}", *FEW, f"run_dir={folder}")
    assert evaluate(*command).code == 0
    before = files(folder)
    summary = json.loads(before["summary.json"][0])
    assert summary["state_bytes"] > 0 or kind == "hf"
    monkeypatch.setattr(session, "WARM_UP", None)  # nothing is warmed up for
    assert evaluate(*command).code == 0
    assert files(folder) == before
    (folder / "summary.json").unlink()  # killed when the state had its last name already
    assert evaluate(*command).code == 0
    assert (
        files(folder).keys() == before.keys()
        and json.loads((folder / "summary.json").read_text()) == summary
    )
    if (folder / "state.safetensors").exists():  # or before that
        (folder / "summary.json").unlink()
        (folder / "state.safetensors").rename(folder / "state-2.safetensors")
        assert evaluate(*command).code == 0
        assert (
            files(folder).keys() == before.keys()
            and json.loads((folder / "summary.json").read_text()) == summary
        )
    assert files(folder)["answers.jsonl"] == before["answers.jsonl"]
