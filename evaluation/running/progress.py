"""Show progress: a line that is written over in a terminal, elsewhere a line a minute, as more would fill a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from ..statistics.metrics import measure

LOG_SECONDS = 60.0  # between two lines of a log


class Progress:
    """Count answers and show them.

    Args:
        label: what is running.
        total, done: answers of all runs, and how many of them are finished already.
    """

    def __init__(self, label: str, total: int, done: int) -> None:
        self.label, self.total, self.done, self.before = label, total, done, done
        self.start = self.printed = time.monotonic()

    def answered(self, count: int, rows: list[dict[str, Any]], label: str) -> None:
        """Count answers of shared forwards, or one; `rows` and `label` are those of one of their runs."""
        run = "" if label == self.label else f"{label}: "
        self.add(count, "answers", lambda: f"; {run}{figures(rows)}")

    def add(self, count: int, unit: str, more: Callable[[], str] = str) -> None:
        """Count what is done, in this unit, and show it with `more` behind it."""
        self.done += count
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if not terminal and now - self.printed < LOG_SECONDS:
            return
        self.printed = now
        minutes = round((now - self.start) / (self.done - self.before) * (self.total - self.done) / 60)
        counted = f"{self.label}: {self.done} of {self.total} {unit}{more()}"
        ends = ("\r\x1b[K", "" if self.done < self.total else "\n") if terminal else ("", "\n")
        line = f"{counted}; {minutes // 60} h {minutes % 60} min left"
        print(f"{ends[0]}{line}", end=ends[1], file=sys.stderr, flush=True)


def figures(rows: list[dict[str, Any]]) -> str:
    """Return the MAT of these answers, and their speed if they are timed."""
    measured = measure(rows)
    speed = measured["tokens_per_second"]
    return f"MAT {measured['mat']:.2f}" + ("" if math.isnan(speed) else f", {speed:.0f} tokens/s")
