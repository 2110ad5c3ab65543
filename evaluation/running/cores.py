"""Was the machine calm? Threads that wait for busy cores slow a CPU's steps many times over, and unevenly."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")


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
