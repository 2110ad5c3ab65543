"""Rows: levels by hand, the newest visit counts, pairs in a bounded table, what is saved and what is refused."""

import math
import random

import numpy as np
import pytest
import torch

from model.dynamic.rows import LEVELS, PairRows, TokenRows, top_k_levels
from model.errors import UserError


def test_levels_are_bits_of_surprise():
    shares = [0.5, 0.25, 0.15, 0.1 - 2**-20, 2**-20]
    ids, levels = top_k_levels(torch.tensor([shares]).log(), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]
    # 1 bit, 2 bits, 2.7, 3.3, 20; the first two lie on an edge, where rounding may go either way
    assert levels[0, 2:].tolist() == [2, 3, LEVELS - 1] and levels[0, 0] in (0, 1) and levels[0, 1] in (1, 2)


@pytest.mark.parametrize("vocab", [61, 2048, 32000, 49152, 50257])
def test_levels_of_large_vocabularies_are_near_the_whole_sums(vocab):
    """The maxima of groups leave out most of the tail: of logits as a model has them, less than one level."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0)) * 2
    logits[torch.arange(4), torch.tensor([3, 5, 7, 60])] = 16.0
    ids, levels = top_k_levels(logits, 8)
    assert ids[:, 0].tolist() == [3, 5, 7, 60] and ids.dtype == np.int32 and levels.dtype == np.uint8
    best = torch.from_numpy(ids).long()
    bits = -torch.log_softmax(logits, -1).gather(1, best) / math.log(2)
    exact = bits.clamp(0, LEVELS - 1).long()
    assert (torch.from_numpy(levels).long() - exact).abs().max() <= 1
    assert torch.equal(logits.gather(1, best), logits.topk(8).values)


def test_the_newest_row_of_a_token_counts():
    rows = TokenRows(10, 2)
    assert rows.find(3) is None
    ids, levels = np.array([[1, 2], [3, 4], [5, 6]]), np.array([[0, 1], [2, 3], [4, 5]])
    rows.write(np.array([3, 7, 3]), ids, levels)
    assert rows.find(3) == 3 and rows.ids[3].tolist() == [5, 6] and rows.levels[3].tolist() == [4, 5]
    assert rows.ids[7].tolist() == [3, 4] and rows.find(0) is None
    rows.reset()
    assert rows.find(3) is None and not rows.ids.any()


def test_pairs_are_found_again_or_not_at_all():
    """A pair that another one has displaced is not found; none is taken for another."""
    rng, rows, newest = random.Random(0), PairRows(64, 1), {}
    for i in range(300):
        before, token = rng.randrange(200_000), rng.randrange(200_000)
        rows.write_pairs(np.array([before]), np.array([token]), np.array([[i]]), np.array([[i % LEVELS]]))
        newest[before, token] = i
        row = rows.find_pair(before, token)
        assert row is not None and rows.ids[row].tolist() == [i]
    found = {pair: row for pair in newest if (row := rows.find_pair(*pair)) is not None}
    assert 32 < len(found) <= 64 and all(rows.ids[row, 0] == newest[pair] for pair, row in found.items())
    assert all(rows.find_pair(token, before) is None for before, token in found if before != token)
    assert PairRows(64, 1).find_pair(0, 0) is None, "an empty table holds nothing, not even pair (0, 0)"


def test_in_one_write_the_last_of_equal_pairs_counts():
    rows = PairRows(8, 1)
    rows.write_pairs(np.array([1, 1]), np.array([2, 2]), np.array([[5], [6]]), np.array([[0], [1]]))
    row = rows.find_pair(1, 2)
    assert row is not None and (rows.ids[row, 0], rows.levels[row, 0]) == (6, 1)


def test_bytes_are_what_is_promised():
    assert PairRows(1 << 16, 8).nbytes == 49 << 16  # 3.2 MB
    assert TokenRows(32000, 8).nbytes == 32000 * 41


def test_what_is_saved_comes_back_and_what_does_not_fit_is_refused():
    rows = PairRows(16, 2)
    rows.write_pairs(np.array([1, 3]), np.array([2, 4]), np.array([[5, 6], [7, 8]]), np.array([[0, 1], [2, 15]]))
    state = {name: tensor.clone() for name, tensor in rows.state_dict().items()}
    other = PairRows(16, 2)
    other.load_state_dict(state, 10)
    assert other.find_pair(3, 4) == rows.find_pair(3, 4) and all(
        torch.equal(other.state_dict()[name], tensor) for name, tensor in state.items()
    )
    for broken, vocab in (
        (state | {"ids": state["ids"][:8]}, 10),
        ({name: tensor for name, tensor in state.items() if name != "keys"}, 10),
        (state | {"levels": state["levels"].long()}, 10),
        (state, 8),
        (state | {"ids": state["ids"] - 1}, 10),
        (state | {"levels": state["levels"] + LEVELS}, 10),
    ):
        with pytest.raises(UserError, match="start: the saved rows"):
            other.load_state_dict(broken, vocab)


@pytest.mark.parametrize("size", [1, 3, -4, 1000, 2.0])
def test_a_size_that_is_no_power_of_two_is_refused(size):
    with pytest.raises(UserError, match="power of two"):
        PairRows(size, 8)
