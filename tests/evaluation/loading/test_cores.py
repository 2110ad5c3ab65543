"""Other processes on the cores: measured where the system says, named below the table."""

import subprocess
import sys

from evaluation.loading.devices import cores_busy
from evaluation.statistics.notes import doubts
from tests.evaluation.made_runs import answer, made


def test_a_busy_neighbour_is_seen():
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        cores_busy(0.3)  # until it has started
        assert cores_busy(0.3) > 0.5
    finally:
        neighbour.kill()
        neighbour.wait()


def test_each_repeat_and_variant_that_began_among_others_is_named():
    rows = [answer(1, "qa", [([1], 1.0)])]
    runs = [made("pld", rows, repeat=i, cores_busy_elsewhere=cores) for i, cores in enumerate([1.5, 0.0, 2.0])]
    runs += [made("recycling (hot)", rows, method={"k": k}, cores_busy_elsewhere=c) for k, c in ((4, 1.0), (8, 0.1))]
    runs += [made("unknown", rows, cores_busy_elsewhere=None)]
    (line,) = doubts(runs)
    assert "pld, repeat 0: 1.5; pld, repeat 2: 2.0; recycling (hot), k=4: 1.0)" in line and "unknown" not in line
    assert doubts([made("calm", rows, cores_busy_elsewhere=0.4)]) == []
