"""What every command line shares: a user's mistake ends in one line on stderr and exit code 2, never in a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from model.errors import UserError
from model.terminal import one_line

__all__ = ["Failure", "fail", "one_line", "told", "user_errors"]

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def told(error: Exception) -> str | None:
    """What to tell a user of an error that he can mend, on one line; None for a defect of this project."""
    if isinstance(error, UserError):
        return one_line(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or one_line(error)}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, wherever this torch keeps it
        return (
            f"out of device memory; set model.context lower, or use a smaller model or dtype ({one_line(error)[:120]})"
        )
    if type(error).__name__ in ("UncompletedJobError", "FailedJobError"):  # submitit's: the job's process died
        return f"a job of the launcher ended before it was done, give the same command again ({one_line(error)[:300]})"
    return None


class Failure:
    """A job's error that its user can mend; the other jobs of a sweep go on, and all failures are told at the end.

    It notes itself wherever it is made: in the job's process and, where a launcher runs jobs in other processes and
    hands back what they return, once more on arrival in the process that tells the user.
    """

    noted: ClassVar[list[str]] = []

    def __init__(self, message: str) -> None:
        self.message = message
        if message not in self.noted:
            self.noted.append(message)

    def __reduce__(self) -> tuple[type[Failure], tuple[str]]:
        return Failure, (self.message,)  # unpickling goes through __init__


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn what a user can mend into one line; a defect of this project keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        fail("stopped; what was finished is kept, and the same command goes on from there", code=INTERRUPTED)
    except BrokenPipeError:  # `... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        message = told(error)
        if message is None:
            raise
        fail(message)


def fail(message: str, code: int = 2) -> None:
    """Print the line and leave."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
