"""Errors of the command lines.

A user's mistake is one line on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from model.errors import fail as fail
from model.errors import user_errors as user_errors
from model.errors import user_message


class Failures(dict[str, bool]):
    """Lines of errors that the user can fix, each with whether it is printed already."""

    early = False  # True: a line is printed when it is added, as other jobs may take hours


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
