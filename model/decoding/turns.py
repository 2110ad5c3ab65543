"""Threads that share a model take turns, a step at a time."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch


class Turns:
    """A re-entrant lock of one model, held for a step: those who wait go before the one who just had it.

    A plain lock would be taken again by its last holder before a waiting thread has woken up. Here whoever comes next
    stands at the front of `_queue` until the lock is free. Both are re-entrant, as an abandoned answer may be closed by
    the garbage collector at any point of this very code.
    """

    def __init__(self) -> None:
        self._queue, self._held = threading.RLock(), threading.RLock()

    def __enter__(self) -> None:
        if self._held._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            self._held.acquire()
            return
        with self._queue:
            self._held.acquire()

    def __exit__(self, *error: object) -> None:
        self._held.release()


_of: WeakKeyDictionary[torch.nn.Module, Turns] = WeakKeyDictionary()
_making = threading.RLock()


def turns_of(model: Any) -> Turns:
    """The turns of a transformers model: one object for all targets of it, and for shallow copies of it.

    They belong to the module that these have in common, the one whose hidden states are read.
    """
    with _making:
        return _of.setdefault(model.get_decoder(), Turns())
