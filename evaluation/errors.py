"""Errors of the command lines.

A user's mistake is one line on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from model.errors import user_errors as user_errors
from model.errors import user_message


@contextmanager
def noted(failures: set[str] | None) -> Iterator[None]:
    """Print an error that the user can fix, once, and add it to `failures`: other jobs go on.

    With None, the error is raised.
    """
    try:
        yield
    except Exception as error:
        message = user_message(error)
        if message is None or failures is None:
            raise
        if message not in failures:
            failures.add(message)
            print(f"left out: {message}", file=sys.stderr, flush=True)
