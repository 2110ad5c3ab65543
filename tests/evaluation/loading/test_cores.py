"""Other processes on the cores: measured where the system says, named below the table."""

import os
import subprocess
import sys

import psutil
import pytest

from evaluation.loading import devices
from evaluation.loading.devices import cores_busy
from evaluation.statistics.notes import doubts
from tests.evaluation.made_runs import answer, made


def test_a_busy_neighbour_is_seen():
    if cores_busy(0.01) is None:
        pytest.skip("this system does not say")
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        cores_busy(0.3)  # until it has started
        assert cores_busy(0.3) > 0.5
    finally:
        neighbour.kill()
        neighbour.wait()


@pytest.mark.skipif(not psutil.LINUX, reason="made up as Linux says it")
def test_ticks_by_hand(tmp_path, monkeypatch):
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 50 6 7 8 9 0\ncpu0 1 2 3\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    ticks = devices._busy_seconds() * os.sysconf("SC_CLK_TCK")
    assert ticks == pytest.approx(100 + 20 + 30 + 6 + 7), "neither idle, nor waiting for a disk, nor stolen is work"
    (tmp_path / "stat").write_text("cpu  100 20\n")
    assert cores_busy(0.0) is None, "nothing that can be read"
    (tmp_path / "stat").unlink()
    assert cores_busy(0.0) is None


def test_each_repeat_and_variant_that_began_among_others_is_named():
    rows = [answer(1, "qa", [([1], 1.0)])]
    runs = [made("pld", rows, repeat=i, cores_busy_elsewhere=cores) for i, cores in enumerate([1.5, 0.0, 2.0])]
    runs += [made("recycling (hot)", rows, method={"k": k}, cores_busy_elsewhere=c) for k, c in ((4, 1.0), (8, 0.1))]
    runs += [made("unknown", rows, cores_busy_elsewhere=None)]
    (line,) = doubts(runs)
    assert "pld, repeat 0: 1.5; pld, repeat 2: 2.0; recycling (hot), k=4: 1.0)" in line and "unknown" not in line
    assert doubts([made("calm", rows, cores_busy_elsewhere=0.4)]) == []
