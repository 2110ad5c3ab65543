"""Weights: cells are distinct, guesses by hand, shares that are learnt, what is saved."""

import itertools
import math

import pytest
import torch

from model.dynamic.rows import LEVELS
from model.dynamic.weights import (
    ALONE,
    AND_SIBLING,
    AND_SIBLING_CHILD,
    BACKOFF,
    CELLS,
    COPIED,
    MATCH_BUCKETS,
    PAIR,
    SIBLING,
    SIBLING_CHILD,
    TOKEN,
    Weights,
    bucket,
    cell,
    is_alone,
)
from model.errors import UserError

SOURCES, SUGGESTED = (PAIR, TOKEN, BACKOFF, SIBLING_CHILD, SIBLING, COPIED), (ALONE, AND_SIBLING_CHILD, AND_SIBLING)


def test_every_kind_has_a_cell_of_its_own():
    kinds = list(itertools.product(SOURCES, SUGGESTED, range(MATCH_BUCKETS), (False, True), range(LEVELS)))
    assert sorted(cell(*kind) for kind in kinds) == list(range(CELLS))
    assert all(is_alone(cell(*kind)) == (kind[1] == ALONE) for kind in kinds)
    assert cell(PAIR, ALONE, 3, False, 5) + LEVELS == cell(PAIR, ALONE, 3, True, 5), "copied, too"
    for kind in ((TOKEN, 2, True, 7), (COPIED, 6, True, 0)):
        assert cell(kind[0], ALONE, *kind[1:]) + cell(PAIR, AND_SIBLING, 0, False) == cell(
            kind[0], AND_SIBLING, *kind[1:]
        )


def test_buckets():
    assert [bucket(m) for m in (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 999)] == [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 7]


def test_guesses_by_hand():
    probs = Weights().probs
    assert probs[cell(PAIR, ALONE, 0, False, 0)] == pytest.approx(0.9 * 2**-0.5)
    assert probs[cell(TOKEN, AND_SIBLING, 0, False, 3)] == pytest.approx(0.6 * 2**-3.5)
    # a match of 4 is accepted with 0.55
    assert probs[cell(PAIR, ALONE, 4, False, 1)] == pytest.approx(0.45 * 0.9 * 2**-1.5)
    assert probs[cell(PAIR, ALONE, 4, True, 1)] == probs[cell(COPIED, ALONE, 4, True)] == 0.55
    assert probs[cell(COPIED, ALONE, 1, True)] == 0.0, "one token that matches says nothing yet"
    assert all(0 <= weight < 1 for weight in probs)


def test_a_weight_goes_to_the_accepted_share():
    weights, at, other = Weights(), cell(PAIR, ALONE, 0, False, 2), cell(TOKEN, ALONE, 0, False, 2)
    guess = weights.probs[at]
    weights.learn([at, at, other], [at])
    assert weights.probs[at] == pytest.approx((4 * guess + 1) / 6)
    assert weights.probs[other] == pytest.approx(4 * weights._prior[other] / 5)
    for _ in range(500):
        weights.learn([at] * 4, [at])
    assert weights.probs[at] == pytest.approx(0.25, abs=0.01)
    weights.reset()
    assert weights.probs[at] == guess
    weights.learn([at] * 6, [at, at, at])  # several nodes of a step, each of whose next token is of this kind
    assert weights.probs[at] == pytest.approx((4 * guess + 3) / 10)
    fixed = Weights(learning=False)
    fixed.learn([at] * 4, [at] * 4)
    assert fixed.probs[at] == guess


def test_what_is_saved_comes_back_bit_for_bit():
    weights, other = Weights(), Weights()
    weights.learn([5, 6, 7, 7], [7])
    state = {name: tensor.clone() for name, tensor in weights.state_dict().items()}
    other.load_state_dict(state)
    weights.learn([5, 7], [5])
    other.learn([5, 7], [5])
    assert weights.probs.tolist() == other.probs.tolist() and torch.equal(
        weights.state_dict()["weights"], other.state_dict()["weights"]
    )
    for broken in ({}, {"weights": torch.ones(2, 5)}, {"weights": torch.full((2, CELLS), math.nan)}):
        with pytest.raises(UserError, match="no weights of this method"):
            other.load_state_dict(broken)
