"""A corpus of token ids in a file, searched by exact match in its suffix array.

Tokens are stored big-endian: the order of their bytes is then the order of the tokens. The file,
mapped into memory, holds `vocab_size` (1,); `suffixes`, int32 (n,), where each suffix begins, in
lexicographic order; and `tokens`, uint8 (n, 2), or (n, 4) for more than 65,536 tokens.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from ...errors import UserError
from ...files import located, save_state
from ..limits import PADDING


def suffix_array(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the suffixes of `tokens` (n,) begin, in lexicographic order: int64 (n,)."""
    n = len(tokens)
    span = 1
    # by a suffix's first `span` tokens; ties share a rank
    rank = np.unique(tokens, return_inverse=True)[1]
    while True:
        # 0 is the end
        following = np.append(rank[span:] + 1, np.zeros(min(span, n), dtype=np.int64))
        keys = rank * (n + 1) + following
        order = np.argsort(keys)
        sorted_keys = keys[order]
        rank[order] = np.append(0, np.cumsum(sorted_keys[1:] != sorted_keys[:-1]))
        if rank[order[-1]] == n - 1:
            return order
        span *= 2


class Datastore:
    def __init__(self, path: str | Path, *, vocab_size: int) -> None:
        try:
            state = load_file(located(path))  # mapped into memory
            size = int(state["vocab_size"])
            self._suffixes = state["suffixes"].numpy()
            tokens = state["tokens"].numpy()
        except Exception:  # whatever safetensors raises
            raise UserError(
                f"datastore {path}: missing, cut short, or not of this version; build one with"
                " `python -m tools.datastore`"
            ) from None

        self._count = len(tokens)
        self._width = int(tokens.shape[1])
        if abs(size - vocab_size) >= PADDING or vocab_size > 256**self._width:
            raise UserError(
                f"datastore {path}: its vocabulary has {size} tokens, the model's {vocab_size}; "
                "build one with this model's tokenizer (`python -m tools.datastore`)"
            )

        self._bytes = tokens.reshape(-1).data
        self._tokens = tokens.view(f">u{self._width}")[:, 0]
        self._order = self._suffixes.data  # (n,); reading one number of it costs 40 ns, numpy's 100

    def __len__(self) -> int:
        return self._count

    def longest(self, context: Sequence[int], *, min_n: int, max_n: int) -> tuple[int, int, int]:
        """Find the longest n-gram at the end of `context`, min_n <= n <= max_n, in the datastore.

        Returns n, first, last: rows first ... last - 1 of the suffix array begin with it.
        """
        context = context[-max_n:]
        key = struct.pack(f">{len(context)}{'H' if self._width == 2 else 'I'}", *context)
        low = min_n
        high = min(max_n, len(context))
        best = (0, 0, 0)

        while low <= high:
            n = (low + high) // 2
            first, last = self._find(key[len(key) - n * self._width :])
            if first < last:
                best = (n, first, last)
                low = n + 1
            else:
                high = n - 1

        return best

    def continuations(
        self, first: int, last: int, *, skip: int, length: int, limit: int
    ) -> NDArray[np.int64]:
        """Return the tokens after the first `skip` of suffixes first ... last - 1: (s, length).

        At most `limit` suffixes are read, evenly spread. -1 is beyond the end.
        """
        count = last - first
        rows_read = min(limit, count)
        rows = first + np.arange(rows_read) * count // rows_read
        positions = self._suffixes[rows, None] + np.arange(skip, skip + length)  # (s, length)
        stored = self._tokens[np.minimum(positions, self._count - 1)]
        return np.where(positions < self._count, stored.astype(np.int64), -1)

    def _find(self, key: bytes) -> tuple[int, int]:
        size = len(key)

        def prefix(position: int) -> bytes:
            at = position * self._width
            return bytes(self._bytes[at : at + size])

        first = bisect_left(self._order, key, key=prefix)
        if first == self._count or prefix(self._order[first]) != key:
            return first, first
        return first, bisect_right(self._order, key, lo=first, key=prefix)


def write_datastore(path: Path, tokens: NDArray[np.int64], vocab_size: int) -> None:
    if not len(tokens):
        raise UserError(f"datastore {path}: the texts hold no tokens")
    if len(tokens) > 2**31:  # positions are int32
        raise UserError(
            f"datastore {path}: {len(tokens)} tokens, but at most 2^31; use fewer texts"
        )

    width = 2 if vocab_size <= 2**16 else 4
    big_endian = tokens.astype(f">u{width}").view(np.uint8).reshape(-1, width)
    state = {
        "vocab_size": torch.tensor([vocab_size]),
        "suffixes": torch.from_numpy(suffix_array(tokens)).int(),
        "tokens": torch.from_numpy(big_endian),
    }
    save_state(state, path)
