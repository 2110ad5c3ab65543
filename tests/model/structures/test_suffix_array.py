"""The suffix array against plain sorting."""

import random
from itertools import pairwise

import numpy as np
import pytest

from model.structures.datastore import suffix_array


def test_banana():
    order = suffix_array(np.array([1, 0, 2, 0, 2, 0]), 3)  # b a n a n a
    assert order.tolist() == [5, 3, 1, 0, 4, 2]


@pytest.mark.parametrize("vocab", [1, 2, 5, 2048, 128_256, 2**33])
def test_equals_sorting_the_suffixes(vocab):
    """Wide vocabularies pack one token into the first key, narrow ones many; periodic texts take every round."""
    rng = random.Random(vocab)
    for n in [1, 2, 3, 64, *(rng.randrange(1, 300) for _ in range(20))]:
        text = [rng.randrange(vocab) for _ in range(n)]
        for tokens in (text, (text[:3] * n)[:n], text[: n // 2] * 2 + [vocab - 1]):
            order = suffix_array(np.array(tokens), vocab).tolist()
            assert sorted(order) == list(range(len(tokens)))
            assert all(tokens[i:] < tokens[j:] for i, j in pairwise(order))
