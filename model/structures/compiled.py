"""Loops of drafting on the host, compiled by numba: how they are compiled, and how their arrays are laid out.

Loops take plain tuples of arrays, which numba reads in half the time of named ones, and give them their names.
"""

from __future__ import annotations

import logging
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError

try:
    import numba
    from numba.core import event
except ImportError as error:  # not there, or it refuses this NumPy
    python = ".".join(map(str, sys.version_info[:2]))
    raise UserError(
        f"numba compiles drafting and cannot be imported ({error}): pip install numba, under Python 3.11 to 3.15 (this "
        f"is {python})"
    ) from error

NONE = -1
ODD = 0x9E3779B97F4A7C15  # Fibonacci hashing: 2^64 over the golden ratio, odd
# Where loops are. One is compiled with those that it calls, and numba notices changes of its own file only.
FILES = ("compiled.py", "suffix_automaton.py", "dynamic_loops.py")
_VERSION = zlib.crc32(b"".join((Path(__file__).parent / name).read_bytes() for name in FILES))
_say = cache(logging.getLogger(__package__).warning)  # once


class _Notice(event.Listener):
    """Says once that loops are compiled, as that begins. Nothing is said where they are loaded."""

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith(f"{__package__}."):
            _say("compiling the loops of drafting, once a machine: some 10 seconds")

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Notice())  # type: ignore[no-untyped-call]


def loop(function: Callable[..., Any]) -> Any:
    """Compile at the first call, or load what an earlier process compiled, where a folder takes that.

    What numba keeps names the module it was compiled in, and the package may be imported as token_recycling, too: its
    name is part of the file's, so that neither loads the other's. No loop allocates memory, so numba's runtime is left
    out: counting references to arrays took more than half of their time.
    """
    function.__qualname__ = f"{__package__}.{_VERSION:08x}.{function.__qualname__}"
    try:
        return numba.njit(cache=True, _nrt=False)(function)
    except RuntimeError:
        return numba.njit(_nrt=False)(function)


def record(**fields: str) -> np.dtype[Any]:
    """Return the type of an array's elements: names and types of their fields."""
    return np.dtype(list(fields.items()), align=True)


@loop
def hashed(key: Any) -> Any:
    return np.uint64(key) * np.uint64(ODD)
