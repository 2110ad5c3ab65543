"""Compile the host's loops with numba, and define the layout of their arrays.

Loops take plain tuples of arrays, which numba reads in half the time of named tuples.
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

from .errors import UserError

try:
    import numba
    from numba.core import event
except ImportError as error:  # numba is missing, or refuses this NumPy
    python = ".".join(map(str, sys.version_info[:2]))
    raise UserError(
        f"numba compiles drafting and cannot be imported ({error}): pip install numba, under Python"
        f" 3.11 to 3.15 (this is {python})"
    ) from error

NONE = -1
ODD = 0x9E3779B97F4A7C15  # Fibonacci hashing: 2^64 over the golden ratio, odd
# Files with loops. A loop is compiled together with the loops it calls, but numba notices only
# changes of its own file.
FILES = (
    "compiled.py",
    "engine/target/intrinsics.py",
    "engine/target/lean_loops.py",
    "methods/copying/suffix_automaton.py",
    "methods/dynamic/dynamic_loops.py",
)
_FOLDER = Path(__file__).parent
VERSION = zlib.crc32(b"".join((_FOLDER / name).read_bytes() for name in FILES))
_say = cache(logging.getLogger(__package__).warning)  # once


class _Notice(event.Listener):
    def on_start(self, event: Any) -> None:
        package = __package__.partition(".")[0]
        if event.data["dispatcher"].py_func.__module__.startswith(f"{package}."):
            _say("compiling loops, once a machine: some 20 seconds")

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Notice())


def loop(function: Callable[..., Any], **settings: Any) -> Any:
    """Compile a function at its first call, or load what an earlier process compiled.

    No loop allocates memory, so numba's runtime is left out: counting references to arrays took
    more than half of the loops' time.
    """
    # the cache names a function's module, and the package may be imported as token_recycling, too
    function.__qualname__ = f"{__package__}.{VERSION:08x}.{function.__qualname__}"
    try:
        return numba.njit(cache=True, _nrt=False, **settings)(function)
    except RuntimeError:
        return numba.njit(_nrt=False, **settings)(function)


def record(**fields: str) -> np.dtype[Any]:
    return np.dtype(list(fields.items()), align=True)


@loop
def hashed(key: Any) -> Any:
    return np.uint64(key) * np.uint64(ODD)
