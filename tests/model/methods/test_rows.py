"""Rows: levels, and pairs in a bounded table; all else by the slow reference of `dynamic`."""

import math
import random

import numpy as np
import pytest
import torch

from model.engine.rule.sampling import top_k_log_probs
from model.methods.dynamic import dynamic_loops as loops
from model.methods.dynamic.dynamic import new_growth
from model.methods.dynamic.dynamic_loops import LEVELS
from model.methods.dynamic.rows import CandidateRows


@pytest.mark.parametrize("vocab", [61, 50257])
def test_levels_of_large_vocabularies_are_near_the_whole_sums(vocab):
    """The maxima of groups leave out most of the tail: for a model's logits, less than a level."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 3] = 16.0
    best, log_probs = top_k_log_probs(logits, 8)
    levels = torch.tensor([[loops.level_of(value) for value in row] for row in log_probs.numpy()])
    exact = -torch.log_softmax(logits, -1).gather(1, best) / math.log(2)
    assert (levels - exact.clamp(0, LEVELS - 1).long()).abs().max() <= 1
    assert torch.equal(logits.gather(1, best), logits.topk(8).values)


def test_pairs_are_found_again_or_not_at_all():
    """A pair may be displaced by another one; none is taken for another."""
    rng = random.Random(0)
    table = CandidateRows(200_000, 1, 64)
    rows = table.rows
    growth = new_growth(1, 200_000, 1)
    newest = {}

    def find(before, token):
        key = (before << 32) | token
        row = loops.pair_row(rows, key)
        return row if rows.keys[row] == key else None

    assert find(0, 0) is None, "an empty table holds nothing, not even pair (0, 0)"
    for i in range(300):
        before = rng.randrange(200_000)
        token = rng.randrange(200_000)
        outcome = (np.array([token]), np.array([[i]]), np.array([[-1.0]], dtype=np.float32))
        loops.learn_prompt(before, 0, False, *outcome, growth, table.arrays)
        newest[before, token] = i
        assert rows.ids[find(before, token)].tolist() == [i]
    kept = {pair: find(*pair) for pair in newest if find(*pair) is not None}
    assert 32 < len(kept) <= 64
    assert all(rows.ids[row, 0] == newest[pair] for pair, row in kept.items())
