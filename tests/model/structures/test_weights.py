"""Weights: guesses by hand, shares that are learnt, what is saved."""

import math

import numpy as np
import pytest
import torch

from model.errors import UserError
from model.structures import dynamic_loops as loops
from model.structures.dynamic_loops import ALONE, AND_SIBLING, COPIED, KINDS, PAIR, TOKEN
from model.structures.weights import Weights


def learn(weights, kind, candidates, accepted):
    """Learn from so many candidates of a kind, the first ones of them accepted."""
    draft = loops.Growth(
        np.zeros(candidates + 1, dtype=loops.NODE), np.zeros(candidates, dtype=loops.CANDIDATE), *5 * [0]
    )
    draft.nodes["first"] = range(candidates + 1)  # each is the candidate of a node of its own
    for name, value in zip(("source", "suggested", "match", "copied", "level"), kind, strict=True):
        draft.candidates[name] = value
    choices = np.array([0] * accepted + [1] * (candidates - accepted))
    loops._learn_weights(np.arange(candidates), choices, draft, (weights.seen, weights.accepted, weights.probs))


def test_guesses_by_hand():
    probs = Weights().probs
    assert probs[PAIR, ALONE, 0, 0, 0] == pytest.approx(0.9 * 2**-0.5)
    assert probs[TOKEN, AND_SIBLING, 0, 0, 3] == pytest.approx(0.6 * 2**-3.5)
    # a match of 4 is accepted with 0.55
    assert probs[PAIR, ALONE, 4, 0, 1] == pytest.approx(0.45 * 0.9 * 2**-1.5)
    assert probs[PAIR, ALONE, 4, 1, 1] == probs[COPIED, ALONE, 4, 1, 0] == 0.55
    assert probs[COPIED, ALONE, 1, 1, 0] == 0.0, "one token that matches says nothing yet"
    assert probs.min() >= 0 and probs.max() < 1


def test_a_weight_goes_to_the_accepted_share():
    weights, kind, other = Weights(), (PAIR, ALONE, 0, 0, 2), (TOKEN, ALONE, 0, 0, 2)
    guess = weights.probs[kind]
    learn(weights, kind, 2, 1)
    learn(weights, other, 1, 0)
    assert weights.probs[kind] == pytest.approx((4 * guess + 1) / 6)
    assert weights.probs[other] == pytest.approx(4 * weights._prior[other] / 5)
    assert (weights.probs != weights._prior).sum() == 2
    for _ in range(500):
        learn(weights, kind, 4, 1)
    assert weights.probs[kind] == pytest.approx(0.25, abs=0.01)
    weights.reset()
    assert weights.probs[kind] == guess


def test_what_is_saved_comes_back_bit_for_bit():
    weights, other = Weights(), Weights()
    learn(weights, (PAIR, ALONE, 0, 0, 5), 3, 1)
    other.load_state_dict({name: tensor.clone() for name, tensor in weights.state_dict().items()})
    for each in (weights, other):
        learn(each, (PAIR, ALONE, 0, 0, 5), 2, 1)
    assert weights.probs.tolist() == other.probs.tolist() and torch.equal(
        weights.state_dict()["weights"], other.state_dict()["weights"]
    )
    for broken in ({}, {"weights": torch.ones(2, 5)}, {"weights": torch.full((2, math.prod(KINDS)), math.nan)}):
        with pytest.raises(UserError, match="no weights of this method"):
            other.check_state(broken)
