"""Show progress: a bar in a terminal, elsewhere one line per minute, as a bar would fill a log."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from ..loading.processes import rank
from ..statistics.metrics import Measures, measure

LOG_SECONDS = 60.0  # between two lines


class Progress:
    """Count answers; only the first of several processes shows them.

    Args:
        label: what is running.
        total, done: answers of all runs, and how many of them are finished already.
    """

    def __init__(self, label: str, total: int, done: int) -> None:
        self.label, self.total, self.done, self._before = label, total, done, done
        self._start = self._printed = time.monotonic()
        self._bar: Any = None
        if rank() == 0 and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, desc=label, unit="answer", dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def answered(self, rows: list[dict[str, Any]], label: str) -> None:
        """Count one more answer. `rows`: all answers of its run so far. `label`: the run's."""
        self.done += 1
        if self._bar is not None:
            figures = measure(rows[-1:])
            method = {} if label == self.label else {"method": label}
            shown = {"mat": f"{figures.mat:.2f}"}
            if timed(figures):
                shown["tokens_per_s"] = f"{figures.tokens_per_second:.0f}"
            self._bar.set_postfix(method | shown, refresh=False)
            self._bar.update()
        elif rank() == 0 and time.monotonic() - self._printed >= LOG_SECONDS:
            self._printed = time.monotonic()
            print(self._line(rows, label), file=sys.stderr, flush=True)

    def _line(self, rows: list[dict[str, Any]], label: str) -> str:
        figures = measure(rows)
        left = (time.monotonic() - self._start) / (self.done - self._before) * (self.total - self.done)
        run = "" if label == self.label else f"{label}: "
        speed = f", {figures.tokens_per_second:.0f} tokens/s" if timed(figures) else ""
        return (
            f"{self.label}: {self.done} of {self.total} answers; {run}MAT {figures.mat:.2f}{speed}; {_time(left)} left"
        )


def timed(figures: Measures) -> bool:
    """True if there is a speed to show."""
    return figures.tokens_per_second == figures.tokens_per_second


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
