"""The compiled automaton against the one in Python: every match and what follows it, texts that outgrow their room."""

import random

import pytest

from model.copying.suffix_automaton import SuffixAutomaton
from tests.model.copying.test_suffix import end_of, random_text, size_of

pytest.importorskip("numba", reason="optional: numba, which compiles drafting")
from model.copying.compiled_automaton import MIN_CAPACITY, CompiledAutomaton


def read_along(one: SuffixAutomaton, other: CompiledAutomaton, text: list[int]) -> int:
    """Read a text from the end of both on; the longest match."""
    places, longest = [one.match, other.match], 0
    for token in text:
        places = [each.transfer(*place, token) for each, place in zip((one, other), places, strict=True)]
        assert places[0] == places[1] and one.following(*places[0]) == other.following(*places[1])
        longest = max(longest, places[0][1])
    return longest


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_automaton_in_python_after_every_piece_of_text(seed):
    rng = random.Random(seed)
    text = random_text(rng, rng.randrange(1, 500))
    if seed % 3 == 0:  # ids as large as they get
        text = [2**31 - 1 - token * 65536 for token in text]
    one, other, longest = SuffixAutomaton(), CompiledAutomaton(), 0
    while len(one.tokens) < len(text):
        piece = text[len(one.tokens) :][: rng.choice([0, 1, 3, 70])]
        one.extend(piece)
        other.extend(iter(piece))
        assert one.tokens == other.tokens and (one.length, one.end) == (other.length, other.end)
        assert one.match == other.match and one.following(*one.match) == other.following(*other.match)
        start = rng.randrange(1 + len(one.tokens))
        longest = max(longest, read_along(one, other, text[start:][:20] + random_text(rng, 5)))
    assert size_of(one) == size_of(other)
    assert all(end_of(one, state) == end_of(other, state) for state in range(size_of(one)[0]))
    assert longest > 1 or len(text) < 20


@pytest.mark.parametrize("kind", ["one letter", "all different", "random"])
def test_a_text_that_outgrows_its_room_keeps_its_matches(kind):
    rng, size = random.Random(1), 9 * MIN_CAPACITY
    text = {
        "one letter": [7] * size,
        "all different": [*range(size)],
        "random": [rng.randrange(9) for _ in range(size)],
    }
    one, other, rooms = SuffixAutomaton(), CompiledAutomaton(), set()
    for place in range(0, size, 5):
        for automaton in (one, other):
            automaton.extend(text[kind][place : place + 5])
        rooms.add(len(other.arrays[0]))
        assert one.match == other.match
    read_along(one, other, text[kind][:100])
    assert len(rooms) > 3 and CompiledAutomaton(text[kind]).match == one.match


def test_an_empty_text_matches_nothing():
    one, other = SuffixAutomaton(), CompiledAutomaton()
    assert one.match == other.match == (0, 0) and one.transfer(0, 0, 5) == other.transfer(0, 0, 5) == (0, 0)
    assert one.following(0, 0) == other.following(0, 0) == (None, 0)
