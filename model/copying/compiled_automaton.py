"""The suffix automaton in flat arrays, for compiled loops. Imported only where `jit.compiled` says so."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from .. import host_loops as loops
from .suffix_automaton import SuffixAutomaton

MIN_CAPACITY = 64  # tokens


class CompiledAutomaton(SuffixAutomaton):
    """A SuffixAutomaton with the same matches, whose states and transitions are rows of arrays.

    Takes 110 to 130 bytes a token of its capacity, which is at most twice the text.

    Attributes:
        arrays: what `host_loops` calls a text; replaced when the text outgrows them.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens, self.arrays = [], _arrays(0)
        self._matched = self.length = self.end = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        first = len(self.tokens)
        self.tokens += tokens
        count = len(self.tokens)
        if count == first:
            return
        if count > len(self.arrays[0]):
            self._grow(max(2 * count, MIN_CAPACITY))
        self.arrays[0][first:count] = self.tokens[first:]
        self._matched, self.length, self.end = loops.extend(self.arrays, count)

    def _grow(self, capacity: int) -> None:
        old, self.arrays = self.arrays, _arrays(capacity)
        tokens, states, transitions, _, counts = self.arrays
        for array, old_array in zip((tokens, states, transitions, counts), (*old[:3], old[4]), strict=True):
            array[: len(old_array)] = old_array
        loops.rehash(self.arrays)

    @property
    def match(self) -> tuple[int, int]:
        return self._matched, self.length  # the root's state is 0

    def following(self, state: int, length: int) -> tuple[int | None, int]:
        token, length = loops.following(self.arrays, state, length)
        return (token if length else None), length

    def transfer(self, state: int, length: int, token: int) -> tuple[int, int]:
        state, length = loops.transfer(self.arrays, state, length, token)
        return state, length


@cache
def compile_loops() -> None:
    """Compile all loops for the types they are called with, or load them."""
    CompiledAutomaton([0] * MIN_CAPACITY).extend([0])


def _arrays(capacity: int) -> tuple[Any, ...]:
    """Arrays of an empty text of this capacity; n tokens make fewer than 2n states and 3n transitions."""
    counts, states = np.zeros(6, dtype=np.int64), np.zeros((2 * capacity + 1, 4), dtype=np.int32)
    counts[loops.STATES], states[0, loops.LINK] = 1, loops.NONE
    transitions, slots = np.zeros((3 * capacity, 4), dtype=np.int32), 1 << (6 * capacity).bit_length()
    return np.zeros(capacity, dtype=np.int32), states, transitions, np.zeros(slots, dtype=np.int32), counts
