"""Suffix drafts: the automaton against brute force, drafts by hand."""

import random

import torch

from model.methods.copying.suffix import Suffix, SuffixRecycling
from model.methods.copying.suffix_automaton import MIN_CAPACITY, SuffixAutomaton, Text
from model.recycling import build_template

V = 61


def longest_repeat(text: list[int]) -> int:
    """Tokens of the longest suffix that also ends earlier."""
    n = len(text)
    return max(
        m for m in range(n) if m == 0 or any(text[e - m : e] == text[n - m :] for e in range(m, n))
    )


def random_text(rng: random.Random, n: int) -> list[int]:
    """Random, periodic, copied from itself, or all of them in turn: what splits states in different ways."""
    letters = rng.randrange(1, 4)
    text = [0]
    while len(text) < n:
        kind = rng.randrange(3)
        size = rng.randrange(1, 9)
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
        text = random_text(rng, rng.randrange(1, 3 * MIN_CAPACITY))
        automaton = SuffixAutomaton()
        for n, token in enumerate(text, 1):
            automaton.extend([token])
            m = automaton.length
            end = automaton.end
            assert m == longest_repeat(text[:n])
            assert m == 0 or (m <= end < n and text[end - m : end] == text[n - m : n])
        counts = Text(*automaton.arrays).counts[0]
        assert counts["states"] <= max(2 * len(text), 2) and counts["transitions"] <= 3 * len(text)


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
