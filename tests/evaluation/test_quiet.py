"""Others at work on the cores: measured where the system says, told where it casts doubt."""

import subprocess
import sys

import pytest

from evaluation import quiet
from evaluation.quiet import cores_busy, doubts
from evaluation.runs import Run


def test_a_busy_neighbour_is_seen():
    if not quiet.STAT.exists():
        pytest.skip("no /proc/stat on this system")
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        cores_busy(0.3)  # until it has started
        assert cores_busy(0.3) > 0.5
    finally:
        neighbour.kill()
        neighbour.wait()


def test_ticks_by_hand(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 4000 50 6 7 0 0 0\ncpu0 1 2 3\n")
    monkeypatch.setattr(quiet, "STAT", stat)
    assert quiet._busy_ticks() == 100 + 20 + 30 + 6 + 7, "neither idle nor waiting for a disk is work"
    monkeypatch.setattr(quiet, "STAT", tmp_path / "missing")
    assert cores_busy(0.0) is None


def test_only_runs_that_began_among_others_are_named(tmp_path):
    def run(label, cores):
        return Run(tmp_path, {"label": label, "cores_busy_elsewhere": cores}, [])

    (line,) = doubts([run("calm", 0.1), run("unknown", None), run("noisy", 1.53)])
    assert "noisy (1.5)" in line and "calm" not in line and "unknown" not in line
    assert doubts([run("calm", 0.4)]) == []
