"""Rows: levels, pairs in a bounded table, states that are refused; all else by the slow reference of `dynamic`."""

import math
import random

import numpy as np
import pytest
import torch

from model.engine.sampling import top_k_log_probs
from model.errors import UserError
from model.methods.dynamic import loop_rows, new_growth
from model.structures import dynamic_loops as loops
from model.structures.compiled import NONE
from model.structures.dynamic_loops import KINDS, LEVELS
from model.structures.rows import PairRows, TokenRows, Weights, on_host


def keep(tokens, pairs, before, read, ids, levels):
    """As a prompt's tokens are kept: in order, each with the one before."""
    growth = new_growth(1, tokens)
    log_probs = -np.array(levels, dtype=np.float32)
    loops.learn_prompt(
        before, 0, False, np.array(read), np.array(ids), log_probs, growth, loop_rows(tokens, pairs)
    )


def find(pairs, before, token):
    return loops.find_pair(pairs.keys, pairs.seen, pairs.shift, before, token)


@pytest.mark.parametrize("vocab", [61, 2048, 50257])
def test_levels_of_large_vocabularies_are_near_the_whole_sums(vocab):
    """The maxima of groups leave out most of the tail: of logits as a model has them, less than one level."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0)) * 2
    logits[torch.arange(4), torch.tensor([3, 5, 7, 60])] = 16.0
    ids, log_probs = on_host(*top_k_log_probs(logits, 8))
    levels = torch.tensor([[loops.level_of(value) for value in row] for row in log_probs])
    assert ids[:, 0].tolist() == [3, 5, 7, 60] and ids.dtype == np.int64
    best = torch.from_numpy(ids)
    exact = (
        (-torch.log_softmax(logits, -1).gather(1, best) / math.log(2)).clamp(0, LEVELS - 1).long()
    )
    assert (levels - exact).abs().max() <= 1
    assert torch.equal(logits.gather(1, best), logits.topk(8).values)


def test_pairs_are_found_again_or_not_at_all():
    """A pair that another one has displaced is not rows_of_pairs; none is taken for another."""
    rng, tokens, pairs, newest = (
        random.Random(0),
        TokenRows(200_000, 1),
        PairRows(200_000, 1, 64),
        {},
    )
    assert find(pairs, 0, 0) == NONE, "an empty table holds nothing, not even pair (0, 0)"
    for i in range(300):
        before, token = rng.randrange(200_000), rng.randrange(200_000)
        keep(tokens, pairs, before, [token], [[i]], [[i % LEVELS]])
        newest[before, token] = i
        assert pairs.ids[find(pairs, before, token)].tolist() == [i]
    rows_of_pairs = {pair: row for pair in newest if (row := find(pairs, *pair)) >= 0}
    assert 32 < len(rows_of_pairs) <= 64 and all(
        pairs.ids[row, 0] == newest[pair] for pair, row in rows_of_pairs.items()
    )
    assert all(find(pairs, token, before) < 0 for before, token in rows_of_pairs if before != token)


def test_states_that_do_not_fit_are_refused():
    rows = PairRows(10, 2, 16)
    keep(TokenRows(10, 2), rows, 1, [2, 4], [[5, 6], [7, 8]], [[0, 1], [2, 15]])
    state = rows.state_dict()
    ids, levels = state["pair_ids"], state["pair_levels"]
    for broken in (
        state | {"pair_ids": ids[:8]},
        PairRows(10, 2, 0).state_dict(),
        {name: tensor for name, tensor in state.items() if name != "pair_keys"},
        state | {"pair_levels": levels.long()},
        state | {"pair_ids": ids + 2},
        state | {"pair_ids": ids - 1},
        state | {"pair_levels": levels + LEVELS},
    ):
        with pytest.raises(UserError, match="start: the saved rows"):
            rows.load_state_dict(broken)
    for broken in (
        {},
        {"weights": torch.ones(2, 5)},
        {"weights": torch.full((2, math.prod(KINDS)), math.nan)},
    ):
        with pytest.raises(UserError, match="no weights of this method"):
            Weights().load_state_dict(broken)
