"""Suffix drafts: the automaton against brute force, drafts by hand, refusals."""

import random
from dataclasses import replace

import torch

from model.engine import Target, generate
from model.methods.suffix import Suffix, SuffixRecycling
from model.recycling import TokenRecycling, build_template
from model.structures.suffix_automaton import MIN_CAPACITY, SuffixAutomaton, Text
from tests.conftest import greedy, toy_model

V = 61


def longest_repeat(text: list[int]) -> int:
    """Tokens of the longest suffix that also ends earlier."""
    n = len(text)
    return max(
        m for m in range(n) if m == 0 or any(text[e - m : e] == text[n - m :] for e in range(m, n))
    )


def random_text(rng: random.Random, n: int) -> list[int]:
    """Random, periodic, copied from itself, or all of them in turn: what splits states in different ways."""
    letters, text = rng.randrange(1, 4), [0]
    while len(text) < n:
        kind, size = rng.randrange(3), rng.randrange(1, 9)
        if kind == 0:
            text += [rng.randrange(letters) for _ in range(size)]
        elif kind == 1:
            text += text[-rng.randrange(1, 4) :] * size
        else:
            start = rng.randrange(len(text))
            text += text[start : start + size]
    return text[:n]


def test_the_longest_match_after_every_token_is_brute_forces():
    for seed in range(30):
        rng = random.Random(seed)
        text = random_text(rng, rng.randrange(1, 60))
        automaton = SuffixAutomaton()
        for n, token in enumerate(text, 1):
            automaton.extend([token])
            m, end = automaton.length, automaton.end
            assert m == longest_repeat(text[:n])
            assert m == 0 or (m <= end < n and text[end - m : end] == text[n - m : n])
        counts = Text(*automaton.arrays).counts[0]
        assert counts["states"] <= max(2 * len(text), 2) and counts["transitions"] <= 3 * len(text)


def test_a_text_that_outgrows_its_room_keeps_its_matches():
    rng, size = random.Random(1), 5 * MIN_CAPACITY
    for text in (
        [7] * size,
        [2**31 - 1 - i for i in range(size)],  # ids as large as they get
        [rng.randrange(9) for _ in range(size)],
    ):
        automaton, rooms = SuffixAutomaton(), set()
        for place in range(0, size, 5):
            automaton.extend(text[place : place + 5])
            rooms.add(len(automaton.arrays[0]))
            assert automaton.length == longest_repeat(text[: place + 5])
        assert len(rooms) > 2 and SuffixAutomaton(text).end == automaton.end


def test_by_hand():
    automaton = SuffixAutomaton([1, 2, 3, 9, 1, 2])
    assert (automaton.length, automaton.end) == (2, 2)
    assert automaton.copy(2, 3) == [3, 9, 1]
    automaton.extend([4, 1, 2])  # of the places behind (1, 2), 2 and 6, the newer
    assert (automaton.length, automaton.end) == (2, 6)
    automaton.extend([3])
    assert (automaton.length, automaton.end) == (3, 3)
    assert (SuffixAutomaton([5, 6]).length, SuffixAutomaton().length) == (0, 0)
    # the match (1, 2, 1) overlaps its earlier place
    automaton = SuffixAutomaton([7, 1, 2, 1, 2, 1])
    assert (automaton.length, automaton.end) == (3, 4)
    assert automaton.copy(4, 5) == [2, 1, 2, 1, 2], (
        "a copy that reaches the text's end goes on with itself"
    )


def test_drafts_by_hand():
    for settings, prompt, expected in (
        # three match: 6, of which 5 are allowed; two match: 4; one matches: below the minimum
        (
            dict(max_draft=5, factor=2.0, min_match=2),
            [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3],
            [3, 4, 5, 6, 7, 8],
        ),
        (
            dict(max_draft=5, factor=2.0, min_match=2),
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3],
            [3, 4, 5, 6, 7],
        ),
        (dict(max_draft=5, factor=2.0, min_match=2), [1, 2, 3, 4, 9, 3], [3]),
        (dict(factor=0.5), [1, 2, 3, 4, 1, 2, 3], [3, 4, 1]),  # half of three, rounded up
    ):
        session = Suffix(V, **settings).session()
        session.begin(prompt)
        assert session.draft(3).tokens.tolist() == expected


def test_the_hybrid_copies_long_matches_and_grows_the_recycled_tree_elsewhere():
    tree = build_template("best", nodes=3, k=2)
    drafter = SuffixRecycling(10, tree, min_match=2, max_draft=3, k=2)
    drafter.load_state_dict(
        {"candidates": torch.tensor([[t + 1, t + 2] for t in range(8)] + [[0, 0]] * 2)}
    )
    session = drafter.session()
    session.begin([1, 2, 7, 9, 1, 2])
    assert session.draft(2).tokens.tolist() == [2, 7, 9, 1]
    session = drafter.session()
    session.begin([1, 2, 7, 9, 5, 2])
    assert tree.rank_paths == [(), (0,), (1,), (0, 0)]
    assert session.draft(2).tokens.tolist() == [2, 3, 4, 4]


def test_the_hybrid_learns_from_copied_steps():
    """A prompt that is answered by copying alone teaches as well."""
    model = toy_model("llama")
    target, start = Target(model), [5, 6, 7, 8]
    drafter = SuffixRecycling(V, build_template("best", nodes=8), min_match=1)
    generate(target, drafter, start + greedy(model, start, 40) + start, max_new_tokens=20)
    assert drafter.partner.matrix.candidates.any()


def test_a_hybrid_that_never_matches_is_token_recycling():
    target, tree = Target(toy_model("llama", seed=4)), build_template("2.2.2")
    hybrid, plain = SuffixRecycling(V, tree, min_match=4096), TokenRecycling(V, tree)
    for prompt in ([4, 5, 6], [7, 8]):
        a, b = (generate(target, d, prompt, max_new_tokens=50) for d in (hybrid, plain))
        assert {step.source for step in a.steps} == {"recycling"}
        assert (a.tokens, [replace(step, source=None) for step in a.steps]) == (b.tokens, b.steps)
