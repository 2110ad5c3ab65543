"""A command given again: a finished run is only read, one cut at any point gets what it would have had."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation.running import runner as session
from model.files import ROOT
from tests.evaluation.conftest import answers_in
from tests.evaluation.running.conftest import core

KINDS = {
    "auto": ("method=dynamic", "method.nodes=auto:8", "method.history_tokens=1000"),
    "hf": ("method=hf",),
}


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_is_left_alone_and_a_lost_summary_is_made_again(
    evaluate, tmp_path, monkeypatch, kind
):
    """It was summarised anew with a reset drafter: without its choice of sizes, or its text."""
    folder = tmp_path / "run"
    few = ("bench.end=2", "max_new_tokens=16", f"run_dir={folder}")
    command = (*KINDS[kind], "start=hot", *few)
    assert evaluate(*command).code == 0
    before = files(folder)
    summary = json.loads(before["summary.json"][0])
    assert summary["state_bytes"] > 0 or kind == "hf"
    monkeypatch.setattr(session, "WARM_UP", None)  # nothing is warmed up for
    assert evaluate(*command).code == 0
    assert files(folder) == before
    # killed when the state had its last name already, or before that
    for last in ("state.safetensors", "state-2.safetensors"):
        (folder / "summary.json").unlink()
        if (folder / "state.safetensors").exists():
            (folder / "state.safetensors").rename(folder / last)
        assert evaluate(*command).code == 0
        assert files(folder).keys() == before.keys()
        assert json.loads((folder / "summary.json").read_text()) == summary
    assert files(folder)["answers.jsonl"] == before["answers.jsonl"]


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(checkpoint, tmp_path):
    """kill -9 from outside, hot start, real processes on the sample bench."""
    command = [sys.executable, "-m", "evaluation.run", "model=path", f"model.path={checkpoint}"]
    command += ["start=hot", "bench.per_category=2", "bench.categories=[mt_bench,qa,code]"]
    command += ["model.context=512", "max_new_tokens=40"]

    def start(folder):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        words = [*command, f"run_dir={folder}"]
        return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    assert start(tmp_path / "calm").wait(120) == 0
    answers = tmp_path / "killed/answers.jsonl"
    rng = random.Random(0)
    kills = 0
    for target in (1, 3, 4):  # kill it some moment after so many answers are there
        process = start(tmp_path / "killed")
        while process.poll() is None:
            if answers.exists() and answers.read_bytes().count(b"\n") >= target:
                time.sleep(rng.random() * 0.05)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.002)
        process.wait(60)
    assert start(tmp_path / "killed").wait(120) == 0 and kills
    assert core(answers_in(tmp_path / "killed")) == core(answers_in(tmp_path / "calm"))
