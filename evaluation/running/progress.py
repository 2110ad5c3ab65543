"""Progress: tqdm's line in a terminal, elsewhere a line a minute, as more would fill a log."""

from __future__ import annotations

import sys

from tqdm import tqdm

LOG_SECONDS = 60.0  # between two lines of a log


class Progress(tqdm):
    """Count what is done of a total, and show it with `postfix`; see tqdm."""

    monitor_interval = 0  # no thread next to what is timed

    def __init__(self, label: str, total: int, done: int = 0, unit: str = "answers") -> None:
        self.terminal = sys.stderr.isatty()
        every = dict(mininterval=0.1 if self.terminal else LOG_SECONDS, miniters=1, smoothing=0, delay=1e-9)
        form = "{desc}: {n_fmt} of {total_fmt} {unit}{postfix}; {remaining} left"
        super().__init__(desc=label, total=total, initial=done, unit=unit, bar_format=form, **every)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Write the line."""
        if self.terminal:
            super().display(msg, pos)
        else:
            print(self, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self.terminal:
            super().close()
