"""Whether the loops of drafting run compiled (`host_loops`, by numba) or in Python, with the same results."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module


@cache
def compiled() -> bool:
    """True if numba is installed; else warn once. Called by methods that it makes faster."""
    try:
        import_module("numba")
    except ImportError as error:  # not there, or it refuses this NumPy
        logging.getLogger(__name__).warning("drafting runs in Python, several times slower than with numba: %s", error)
        return False
    return True
