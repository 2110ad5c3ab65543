"""Was the machine calm? Threads that wait for busy cores slow a CPU's steps many times over, and unevenly."""

from __future__ import annotations

import time

import psutil

WORK = ("user", "nice", "system", "irq", "softirq")  # neither idle, nor waiting for a disk, nor stolen by a host


def cores_busy(seconds: float = 0.2) -> float | None:
    """Cores that other processes keep busy while this one sleeps; None where the system does not say."""
    try:
        before = _busy_seconds()
        time.sleep(seconds)
        return (_busy_seconds() - before) / seconds
    except (OSError, ValueError, TypeError):
        return None


def _busy_seconds() -> float:
    """Since the start, of all cores together, on work."""
    times = psutil.cpu_times()
    return sum(getattr(times, kind, 0.0) for kind in WORK)
