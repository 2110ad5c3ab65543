"""Suffix automaton: the longest suffix of a text that occurred in it before, in O(1) amortised per token.

Blumer et al. 1984, as SAM-Decoding uses it (arXiv 2411.10666, 3.1 and algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .. import host_loops as loops

MIN_CAPACITY = 64  # tokens


class SuffixAutomaton:
    """Reads every substring of a text that grows at its end.

    A text of n tokens has fewer than 2n states and 3n transitions; appending it follows O(n) links in all. Takes 110 to
    130 bytes a token of its capacity, which is at most twice the text.

    Attributes:
        tokens: the text.
        length: of its longest suffix that occurred before; 0 if none did. The two may overlap.
        end: the place behind that earlier occurrence, where its continuation begins.
        arrays: the fields of `host_loops.Text`; replaced when the text outgrows them.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        empty = _room(0)
        empty.states["link"], empty.counts["states"] = loops.NONE, 1  # of the empty text
        self.arrays = tuple(empty)
        self._grow(MIN_CAPACITY)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens one after another."""
        first = len(self.tokens)
        self.tokens += tokens
        count = len(self.tokens)
        if count > len(self.arrays[0]):
            self._grow(2 * count)
        self.arrays[0][first:count] = self.tokens[first:]
        self.length, self.end = loops.extend(self.arrays, count)

    def copy(self, end: int, count: int) -> list[int]:
        """Return `count` tokens from place `end` < n on; a copy that reaches the text's end continues with itself."""
        tokens = self.tokens[end : end + count]
        return tokens if len(tokens) == count else (tokens * -(-count // len(tokens)))[:count]

    def _grow(self, capacity: int) -> None:
        """Make room for so many tokens."""
        old, new = loops.Text(*self.arrays), _room(capacity)
        for name in ("tokens", "states", "transitions", "counts"):
            array = getattr(old, name)
            getattr(new, name)[: len(array)] = array
        self.arrays = tuple(new)
        loops.rehash(self.arrays)


def _room(capacity: int) -> loops.Text:
    """Return arrays for a text of so many tokens: they make fewer than 2n states and 3n transitions."""
    return loops.Text(
        tokens=np.zeros(capacity, dtype=np.int32),
        states=np.zeros(2 * capacity + 1, dtype=loops.STATE),
        transitions=np.zeros(3 * capacity, dtype=loops.TRANSITION),
        slots=np.zeros(1 << (6 * capacity).bit_length(), dtype=np.int32),
        counts=np.zeros(1, dtype=loops.COUNTS),
    )
