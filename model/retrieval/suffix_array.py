"""Suffix array of token ids, by prefix doubling in numpy (Manber and Myers 1990; Larsson and Sadakane 2007).

Suffixes are sorted by their first h tokens, then by 2h, 4h, ...: the second half of a suffix's key is the rank that the
suffix h tokens on already has. As in Larsson and Sadakane's form, a round sorts again only those that are not yet
apart yet. The first round packs as many tokens as fit into one 63-bit key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def suffix_array(tokens: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Where the suffixes of `tokens` (n,) begin, in lexicographic order: int64 (n,). A prefix comes first.

    Args:
        vocab_size: all tokens are from 0 to below this.
    """
    n = len(tokens)
    bits = int(vocab_size).bit_length()  # token + 1 fits; 0 is the end
    span = 63 // bits
    keys = np.zeros(n, dtype=np.int64)
    for offset in range(span):
        keys <<= bits
        keys[: max(n - offset, 0)] |= tokens[offset:] + 1
    order = np.argsort(keys)
    open_ = np.arange(n)  # rows of `order` whose suffixes are still equal; groups of equals are neighbours
    keys = keys[order]
    rank = np.zeros(n, dtype=np.int64)  # of each suffix: the first row of its group
    while True:
        fresh = np.concatenate(([True], keys[1:] != keys[:-1]))  # where a group begins
        group = np.maximum.accumulate(np.where(fresh, open_, 0))
        rank[order[open_]] = group
        alone = fresh & np.append(fresh[1:], True)
        open_, group = open_[~alone], group[~alone]
        if not len(open_):
            return order
        suffixes = order[open_]
        behind = suffixes + span
        keys = np.where(behind < n, rank[np.minimum(behind, n - 1)] + 1, 0)
        keys += group * (n + 1)
        turn = np.argsort(keys)
        order[open_], keys = suffixes[turn], keys[turn]
        span *= 2
