"""Errors of the command lines: a user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from model.errors import user_errors as user_errors
from model.errors import user_message


@contextmanager
def noted(failures: set[str] | None) -> Iterator[None]:
    """Print a user's error once and add it to `failures`, so that other jobs go on."""
    try:
        yield
    except Exception as error:
        message = user_message(error)
        if message is None or failures is None:
            raise
        if message not in failures:
            failures.add(message)
            print(f"left out: {message}", file=sys.stderr, flush=True)
