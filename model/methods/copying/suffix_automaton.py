"""Suffix automaton: the longest suffix of a text that occurred in it before.

Blumer et al. 1984, as SAM-Decoding uses it (arXiv 2411.10666, 3.1 and algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...compiled import NONE, hashed, loop, record

MIN_CAPACITY = 64  # tokens

# A state represents substrings that end at the same positions; its link leads to the longest of
# their suffixes that ends elsewhere, too. The text's longest match is the state to which the whole
# text's state links.
STATE = record(
    link="i4",
    length="i4",  # of its longest substring
    # the index after the newest occurrence that was the text's longest match, or after the first
    end="i4",
    first="i4",  # the index after its first occurrence
    transitions="i4",  # its newest transition, counted from 1; 0: none
)
# next: the state's next older one, counted from 1
TRANSITION = record(state="i4", token="i4", target="i4", next="i4")
COUNTS = record(
    tokens="i8",
    states="i8",
    transitions="i8",
    whole="i8",  # the state of the whole text
    match="i8",  # the length of the whole text's longest suffix that occurred before
    match_end="i8",  # the index after that occurrence
)


class Text(NamedTuple):
    tokens: Any  # int32
    states: Any  # STATE
    transitions: Any  # TRANSITION
    # int32: a hash table of the transitions, counted from 1; 0: an empty slot. Its size is a power
    # of two
    slots: Any
    counts: Any  # COUNTS (1,)


class SuffixAutomaton:
    """Recognises every substring of a text that grows; a token takes 120 to 140 bytes.

    Attributes:
        length: of the text's longest suffix that occurred before; the two may overlap.
        end: the index after the newest earlier occurrence that was the longest match at its time.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        empty = _room(0)
        # the state of the empty text
        empty.states["link"] = NONE
        empty.counts["states"] = 1
        self.arrays = tuple(empty)
        self._grow(MIN_CAPACITY)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        first = len(self.tokens)
        self.tokens += tokens
        count = len(self.tokens)
        if count > len(self.arrays[0]):
            self._grow(2 * count)
        self.arrays[0][first:count] = self.tokens[first:]
        self.length, self.end = extend(self.arrays, count)

    def copy(self, end: int, count: int) -> list[int]:
        """Return `count` tokens from index `end` < n on; beyond the text's end they repeat."""
        tokens = self.tokens[end : end + count]
        return tokens if len(tokens) == count else (tokens * -(-count // len(tokens)))[:count]

    def copy_first(self, count: int) -> list[int]:
        """Return the `count` tokens after the match's first occurrence, padded with 0.

        As in SAM-Decoding's code, if too few tokens follow it, that of a shorter suffix is used.
        """
        text = Text(*self.arrays)
        last = len(self.tokens) - 1
        links = text.states["link"]
        first = text.states["first"]
        state = links[text.counts["whole"][0]]
        while links[state] > 0 and last - first[state] <= count:
            state = links[state]

        tokens = self.tokens[first[state] : last][:count]
        return tokens + [0] * (count - len(tokens))

    def find(self, tail: Sequence[int], min_n: int, max_n: int) -> tuple[int, bool]:
        """Find `tail`'s longest suffix, min_n to max_n tokens, that the text continues.

        Returns the index after its first occurrence, or 0, and whether it occurred twice or more,
        always followed by the same token.
        """
        return find(self.arrays, np.array(tail[-max_n:], dtype=np.int32), min_n)  # type: ignore[no-any-return]

    def _grow(self, capacity: int) -> None:
        old = Text(*self.arrays)
        new = _room(capacity)
        for name in ("tokens", "states", "transitions", "counts"):
            array = getattr(old, name)
            getattr(new, name)[: len(array)] = array
        self.arrays = tuple(new)
        rehash(self.arrays)


def _room(capacity: int) -> Text:
    return Text(
        tokens=np.zeros(capacity, dtype=np.int32),
        states=np.zeros(2 * capacity + 1, dtype=STATE),
        transitions=np.zeros(3 * capacity, dtype=TRANSITION),
        slots=np.zeros(1 << (6 * capacity).bit_length(), dtype=np.int32),
        counts=np.zeros(1, dtype=COUNTS),
    )


@loop
def extend(arrays: Any, count: int) -> Any:
    text = Text(*arrays)
    counts = text.counts[0]
    for index in range(counts.tokens, count):
        _append(text, index)
    counts.tokens = count
    return counts.match, counts.match_end


@loop
def _append(text: Text, index: int) -> None:
    states = text.states
    counts = text.counts[0]
    token = text.tokens[index]
    new = counts.states
    counts.states = new + 1
    states[new].length = states[new].end = states[new].first = index + 1
    state = counts.whole
    transition = np.int64(NONE)

    while state >= 0:
        transition = _find_transition(text.transitions, text.slots, state, token)
        if transition >= 0:
            break
        _connect(text, state, token, new)
        state = np.int64(states[state].link)

    match = np.int64(0)
    if state >= 0:
        match = np.int64(text.transitions[transition].target)
        if states[match].length > states[state].length + 1:
            match = _split(text, match, state, token)

    states[new].link = match
    counts.whole = new
    counts.match = states[match].length
    counts.match_end = states[match].end
    # later matches continue this occurrence; the match's own suffixes keep theirs
    states[match].end = index + 1


@loop
def _split(text: Text, long: int, state: Any, token: int) -> Any:
    """Split off the substrings of `long` up to `state` + token; return their state."""
    states = text.states
    transitions = text.transitions
    counts = text.counts[0]
    short = counts.states
    counts.states = short + 1
    states[short].length = states[state].length + 1
    states[short].end = states[long].end
    states[short].first = states[long].first
    states[short].link = states[long].link
    states[long].link = short
    entry = states[long].transitions

    while entry:
        copied = transitions[entry - 1]
        _connect(text, short, copied.token, copied.target)
        entry = copied.next

    while state >= 0:
        transition = _find_transition(transitions, text.slots, state, token)
        if transition < 0 or transitions[transition].target != long:
            break
        transitions[transition].target = short
        state = np.int64(states[state].link)

    return short


@loop
def _slot(transitions: Any, slots: Any, state: int, token: int) -> Any:
    mask = len(slots) - 1
    slot = np.int64(hashed((np.int64(state) << 32) | np.int64(token)) >> np.uint64(32)) & mask
    while slots[slot]:
        entry = transitions[slots[slot] - 1]
        if entry.state == state and entry.token == token:
            break
        slot = (slot + 1) & mask
    return slot


@loop
def _find_transition(transitions: Any, slots: Any, state: int, token: int) -> Any:
    return np.int64(slots[_slot(transitions, slots, state, token)]) - 1


@loop
def _connect(text: Text, state: int, token: int, target: int) -> None:
    counts = text.counts[0]
    origin = text.states[state]
    new = text.transitions[counts.transitions]
    counts.transitions += 1
    text.slots[_slot(text.transitions, text.slots, state, token)] = counts.transitions
    new.state = state
    new.token = token
    new.target = target
    new.next = origin.transitions
    origin.transitions = counts.transitions


@loop
def rehash(arrays: Any) -> None:
    text = Text(*arrays)
    for transition in range(text.counts[0].transitions):
        entry = text.transitions[transition]
        text.slots[_slot(text.transitions, text.slots, entry.state, entry.token)] = transition + 1


@loop
def transfer(text: Text, state: Any, length: Any, token: int) -> Any:
    """Return the longest match's state and length after one more token (2411.10666, 1)."""
    transitions = text.transitions
    transition = _find_transition(transitions, text.slots, state, token)
    while state and transition < 0:
        state = np.int64(text.states[state].link)
        length = np.int64(text.states[state].length)
        transition = _find_transition(transitions, text.slots, state, token)

    if transition < 0:
        return np.int64(0), np.int64(0)
    return np.int64(transitions[transition].target), length + 1


@loop
def find(arrays: Any, tail: Any, min_n: int) -> Any:
    text = Text(*arrays)
    states = text.states
    state = np.int64(0)
    length = np.int64(0)
    for token in tail:
        state, length = transfer(text, state, length, token)
    if states[state].transitions == 0:  # it occurred only at the text's end
        state = np.int64(states[state].link)
        length = np.int64(states[state].length)
    if length < min_n:
        return np.int64(0), False

    newest = text.transitions[states[state].transitions - 1]
    after = states[newest.target]
    # A state's substrings occurred again if it was a match once, which moved its end.
    return np.int64(states[state].first), newest.next == 0 and after.end != after.first


@loop
def following(text: Text, state: int, length: int) -> Any:
    """Return the token that followed a match before and the match's length; or NONE and 0."""
    counts = text.counts[0]
    end = np.int64(text.states[state].end)
    if end == counts.tokens:  # nothing follows this match: use the text's own one
        end = counts.match_end
        length = min(length, counts.match)
    if length == 0:
        return np.int64(NONE), np.int64(0)
    return np.int64(text.tokens[end]), length
