"""Was the machine calm? Threads that wait for busy cores slow a CPU's steps many times over, and unevenly."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from .pools import pools
from .runs import Run

STAT = Path("/proc/stat")
BUSY = 0.5  # cores taken by others from which timings are doubtful


def cores_busy(seconds: float = 0.2) -> float | None:
    """Cores that other processes keep busy while this one sleeps; None where the system does not say (not Linux)."""
    before = _busy_ticks()
    time.sleep(seconds)
    after = _busy_ticks()
    if before is None or after is None:
        return None
    return (after - before) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks() -> int | None:
    """Ticks since the start that any core has spent on work."""
    try:
        user, nice, system, _, _, *interrupts = map(int, STAT.read_text().split("\n", 1)[0].split()[1:8])
    except (OSError, ValueError):
        return None
    return user + nice + system + sum(interrupts)


def doubts(runs: Sequence[Run]) -> list[str]:
    """One line for the report where runs on a CPU began while other processes were at work."""
    noisy = [
        f"{pool.name}{f', repeat {repeat}' if len(pool.repeats) > 1 else ''} ({cores:.1f})"
        for pool in pools(runs)
        for repeat, shards in pool.repeats.items()
        if (cores := max(run.metadata.get("cores_busy_elsewhere") or 0.0 for run in shards)) > BUSY
    ]
    if not noisy:
        return []
    return [
        f"cores taken by other processes when a run began: {'; '.join(noisy)}; timings are doubtful. On a shared "
        "machine OMP_NUM_THREADS=1 suffers least"
    ]
