"""The one exception for a user's mistake, and how commands print it."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """A user's mistake: what is wrong, where, and what to do."""


# Characters to escape: C0 except newline and tab, DEL, C1 (U+009B opens a sequence as ESC [ does),
# and bidirectional embeddings, overrides and isolates, which reorder text. Bidirectional marks
# stay, as right-to-left text needs them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    return _CONTROLS.sub(lambda control: f"\\u{ord(control[0]):04x}", text)


def whole_characters(text: str) -> str:
    """Join the halves of a surrogate pair, and replace single halves by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# What writing to standard output raises: a disk or quota is full, a terminal or reader is gone.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE)


@contextmanager
def complete_output() -> Iterator[None]:
    """Write out standard output, as Python's own attempt at exit would fail with a traceback."""
    if sys.stdout is None:
        raise UserError("standard output: is closed")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:  # of a file
            raise
        # what is in the buffer is lost
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise UserError(f"standard output: cannot be written ({error.strerror})") from None


def closest(name: str, names: Iterable[str]) -> str:
    return "".join(difflib.get_close_matches(name, names, 1, 0.75))


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, *words: Any, **more: Any) -> Any:
        namespace, unknown = super().parse_known_args(*words, **more)
        options = re.findall(r"--[\w-]+", self.format_help())
        for word in unknown:
            if near := closest(word.partition("=")[0], options):
                raise UserError(f"{word}: no such option; did you mean {near}?")
        return namespace, unknown


def one_line(text: BaseException | str) -> str:
    return visible(" ".join(str(text).split()))


def user_message(error: Exception) -> str | None:
    """Return the line for an error that the user can fix; None for a defect of this project."""
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
def user_errors(
    finished: str = "what was finished is kept, and the same command goes on from there",
) -> Iterator[None]:
    """Print an error that the user can fix as one line and exit; `finished` is for Ctrl-C."""
    try:
        with complete_output():
            # characters that the terminal lacks are printed as escapes
            for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "replace")):
                if isinstance(stream, io.TextIOWrapper):  # a host may have put another one there
                    stream.reconfigure(errors=errors)
            yield
    except KeyboardInterrupt:
        fail(f"stopped; {finished}", code=130)  # as a shell reports it
    except BrokenPipeError:  # `... | head` has closed the pipe
        sys.exit(1)
    except Exception as error:
        if (message := user_message(error)) is None:
            raise
        fail(message)


def fail(message: str, code: int = 2) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
