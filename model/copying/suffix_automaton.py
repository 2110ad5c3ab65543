"""Suffix automaton: the longest suffix of a text that occurred in it before, in O(1) amortised per token.

Blumer et al. 1984, as SAM-Decoding uses it (arXiv 2411.10666, 3.1 and algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable

from .. import jit


class SuffixAutomaton:
    """Reads every substring of a text that grows at its end.

    A state represents substrings that end at the same places; its link leads to the longest of their suffixes that ends
    elsewhere, too. So the link of the whole text's state is the longest suffix that occurred before, and no search
    is needed. A text of n tokens has fewer than 2n states and 3n transitions; appending it follows O(n) links in all.

    Attributes:
        tokens: the text.
        length: of its longest suffix that occurred before; 0 if none did. The two may overlap.
        end: the place behind that earlier occurrence, where its continuation begins.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.length = self.end = 0
        # Per state: its transitions, its link, the length of its longest substring, the place behind an occurrence.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]
        self._whole = 0  # the state of the whole text
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens one after another."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        nexts, links = self._next, self._link
        self.tokens.append(token)
        here = len(self.tokens)
        new = self._state({}, here, here)
        state = self._whole
        while state >= 0 and token not in nexts[state]:
            nexts[state][token] = new
            state = links[state]
        match = 0 if state < 0 else nexts[state][token]
        if state >= 0 and self._length[match] > self._length[state] + 1:
            match = self._split(match, state, token)
        links[new], self._whole = match, new
        self.length, self.end = self._length[match], self._end[match]
        self._end[match] = here  # from now on this occurrence, the newest, is continued

    def _split(self, long: int, state: int, token: int) -> int:
        """Split off the substrings of `long` that end here as well: those up to `state` + token."""
        nexts, links = self._next, self._link
        short = self._state(nexts[long].copy(), self._length[state] + 1, self._end[long])
        links[short], links[long] = links[long], short
        while state >= 0 and nexts[state].get(token) == long:
            nexts[state][token] = short
            state = links[state]
        return short

    def _state(self, transitions: dict[int, int], length: int, end: int) -> int:
        self._next.append(transitions)
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    @property
    def match(self) -> tuple[int, int]:
        """The state and length of the longest suffix that occurred before; (0, 0) where none did."""
        return (self._link[self._whole], self.length) if self.length else (0, 0)

    def following(self, state: int, length: int) -> tuple[int | None, int]:
        """Return the token that followed a match before, and the length of the match that it followed; else None and 0.

        A match that occurred at the text's end alone has no follower; then the text's own match is used.
        """
        end = self._end[state]
        if end == len(self.tokens):
            end, length = self.end, min(length, self.length)
        return (self.tokens[end], length) if length else (None, 0)

    def copy(self, end: int, count: int) -> list[int]:
        """Return `count` tokens from place `end` < n on; a copy that reaches the text's end continues with itself."""
        tokens = self.tokens[end : end + count]
        return tokens if len(tokens) == count else (tokens * -(-count // len(tokens)))[:count]

    def transfer(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and length of the longest match after one more token (algorithm 1)."""
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        follower = self._next[state].get(token)
        return (0, 0) if follower is None else (follower, length + 1)


def automaton_class() -> type[SuffixAutomaton]:
    """Return the compiled automaton if there is one; its loops are compiled here, before anything is timed."""
    if not jit.compiled():
        return SuffixAutomaton
    from .compiled_automaton import CompiledAutomaton, compile_loops

    compile_loops()
    return CompiledAutomaton
