"""Show progress: a bar in a terminal, elsewhere one line per minute, as a bar would fill a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
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
        self.label, self.total, self.done, self._before = label, total, done, done
        self._start = self._printed = time.monotonic()
        self._known_from = math.inf  # so many answers, and there is an estimate
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, desc=label, unit="answer", dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin_round(self, runs: int) -> None:
        """Note that all runs, so many, answer a question each now; time left is estimated behind the first round.

        Before it, runs that were behind catch up on their own, at another pace.
        """
        if self._known_from == math.inf:
            self._start, self._before, self._known_from = time.monotonic(), self.done, self.done + runs

    def answered(self, answers: Sequence[tuple[list[dict[str, Any]], str]]) -> None:
        """Count answers of shared forwards, or one; of each its run's rows so far, and label."""
        self.done += len(answers)
        rows, label = answers[0]
        if self._bar is not None:
            figures = measure(rows[-1:])
            method = {} if label == self.label else {"method": label}
            shown = {"mat": f"{figures['mat']:.2f}"}
            if timed(figures):
                shown["tokens_per_s"] = f"{figures['tokens_per_second']:.0f}"
            self._bar.set_postfix(method | shown, refresh=False)
            self._bar.update(len(answers))
        elif time.monotonic() - self._printed >= LOG_SECONDS:
            self._printed = time.monotonic()
            print(self._line(rows, label), file=sys.stderr, flush=True)

    def _line(self, rows: list[dict[str, Any]], label: str) -> str:
        figures = measure(rows)
        left = ""
        if self.done >= self._known_from:
            pace = (time.monotonic() - self._start) / (self.done - self._before)
            left = f"; {_time(pace * (self.total - self.done))} left"
        run = "" if label == self.label else f"{label}: "
        speed = f", {figures['tokens_per_second']:.0f} tokens/s" if timed(figures) else ""
        return f"{self.label}: {self.done} of {self.total} answers; {run}MAT {figures['mat']:.2f}{speed}{left}"


def timed(figures: dict[str, Any]) -> bool:
    """True if there is a speed to show."""
    return bool(figures["tokens_per_second"] == figures["tokens_per_second"])


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
