"""Seconds by phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict

from model.engine import Target


class PhaseClock:
    """Add up seconds by phase; synchronises the device at each mark, so that work counts in its phase."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.restart()

    def restart(self) -> None:
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        self.target.synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self.counts[phase] += 1
        self._last = now
