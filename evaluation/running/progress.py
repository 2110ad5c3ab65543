"""Show progress: a bar in a terminal, elsewhere one line per minute, as a bar would fill a log."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from tqdm import tqdm

from ..statistics.metrics import measure

LOG_SECONDS = 60.0  # between two lines


class Progress:
    """Count answers and show them.

    Args:
        label: what is running.
        total, done: answers of all runs, and how many of them are finished already.
    """

    def __init__(self, label: str, total: int, done: int) -> None:
        self.label, self.total, self.done, self.before = label, total, done, done
        self.start = self.printed = time.monotonic()
        silent = not sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=done, desc=label, unit="answer", dynamic_ncols=True, disable=silent)

    def answered(self, count: int, rows: list[dict[str, Any]], label: str) -> None:
        """Count answers of shared forwards, or one; `rows` and `label` are those of one of their runs."""
        self.done += count
        run = "" if label == self.label else f"{label}: "
        if not self.bar.disable:
            self.bar.set_postfix_str(run + figures(rows[-1:]), refresh=False)
            self.bar.update(count)
        elif time.monotonic() - self.printed >= LOG_SECONDS:
            self.printed = time.monotonic()
            seconds = (self.printed - self.start) / (self.done - self.before) * (self.total - self.done)
            minutes = round(seconds / 60)
            left = f"{minutes // 60} h {minutes % 60} min left"
            counted = f"{self.done} of {self.total} answers"
            print(f"{self.label}: {counted}; {run}{figures(rows)}; {left}", file=sys.stderr, flush=True)


def figures(rows: list[dict[str, Any]]) -> str:
    """Return the MAT of these answers, and their speed if they are timed."""
    measured = measure(rows)
    speed = measured["tokens_per_second"]
    return f"MAT {measured['mat']:.2f}" + ("" if math.isnan(speed) else f", {speed:.0f} tokens/s")
