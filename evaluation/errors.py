"""Errors of the command lines.

A user's mistake is one line on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from model.errors import UserError, complete_output, one_line, start_command


class Failures(dict[str, bool]):
    """Lines of errors that the user can fix, each with whether it is printed already."""

    early = False  # True: a line is printed when it is added, as other jobs may take hours


def user_message(error: Exception) -> str | None:
    """Return the line to print for an error that the user can fix.

    None is returned for a defect of this project.
    """
    text = one_line(error)
    kind = type(error).__name__
    if isinstance(error, UserError):
        return text
    if isinstance(error, OSError):
        return (f"{error.filename}: " if error.filename else "") + (error.strerror or text)
    if kind == "OutOfMemoryError":  # torch's; its module differs by version
        return (
            "out of device memory; set model.context lower,"
            f" or use a smaller model or dtype ({text[:120]})"
        )
    if kind in ("UncompletedJobError", "FailedJobError"):  # submitit's: the job's process died
        return (
            "a job of the launcher ended before it was done,"
            f" give the same command again ({text[:300]})"
        )

    return None


@contextmanager
def noted(failures: Failures | None) -> Iterator[None]:
    """Add the line of an error that the user can fix to `failures`, so that other jobs go on.

    With None, the error is raised.
    """
    try:
        yield
    except Exception as error:
        message = user_message(error)
        if message is None or failures is None:
            raise
        if message not in failures:
            failures[message] = failures.early
            if failures.early:
                print(f"left out: {message}", file=sys.stderr, flush=True)


@contextmanager
def user_errors(
    kept: str = "what was finished is kept, and the same command goes on from there",
) -> Iterator[None]:
    """Print an error that the user can fix as one line and exit.

    A defect of this project keeps its traceback.

    Args:
        kept: what is left where Ctrl-C stops the command.
    """
    try:
        with complete_output():
            start_command()
            yield
    except KeyboardInterrupt:
        fail(f"stopped; {kept}", code=130)  # as a shell reports it
    except BrokenPipeError:  # `... | head` has closed the pipe
        sys.exit(1)
    except Exception as error:
        if (message := user_message(error)) is None:
            raise
        fail(message)


def fail(message: str, code: int = 2) -> None:
    """Print the line and exit."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
