"""Unigram and bigram tables: the target's top candidates after a token, and after a pair, when last seen there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..decoding.sampling import top_k_and_bits
from ..errors import UserError

LEVELS = 16  # of estimated probability: level l is 2^-(l + 1) to 2^-l, the last one all below
MAX_PAIRS = 1 << 24
_ODD = 0x9E3779B97F4A7C15  # Fibonacci hashing: 2^64 over the golden ratio, odd
_WORD = (1 << 64) - 1


def top_k_levels(logits: torch.Tensor, k: int) -> tuple[Any, Any]:
    """Return the top k of each row, best first, and their levels: (n, V) -> int32 (n, k) and uint8 (n, k).

    A level is an estimate (see `top_k_and_bits`); how often candidates of a level are accepted is learnt.
    """
    return on_host(*top_k_and_bits(logits, k))


def on_host(best: torch.Tensor, bits: torch.Tensor) -> tuple[Any, Any]:
    """Convert candidates and their bits, (n, k) each, to int32 ids and uint8 levels on the host."""
    k = best.shape[1]
    both = torch.cat((best, bits.clamp(0, LEVELS - 1).long()), 1).cpu().numpy()  # (n, 2 k): one transfer
    return both[:, :k].astype(np.int32), both[:, k:].astype(np.uint8)


class TokenRows:
    """A row a token: V x k candidates and their levels. Empty until the token was seen; the newest visit counts."""

    def __init__(self, vocab_size: int, k: int) -> None:
        self.ids = np.zeros((vocab_size, k), dtype=np.int32)
        self.levels = np.zeros((vocab_size, k), dtype=np.uint8)
        self.seen = np.zeros(vocab_size, dtype=bool)

    def find(self, token: int) -> int | None:
        """Return the row of a token; None if it was not seen."""
        return token if self.seen[token] else None

    def write(self, tokens: Any, ids: Any, levels: Any) -> None:
        """Write rows (m, k) for tokens (m,), in order: of equal tokens the last one wins."""
        self.ids[tokens], self.levels[tokens], self.seen[tokens] = ids, levels, True

    def reset(self) -> None:
        self.seen[:] = False
        self.ids[:] = 0
        self.levels[:] = 0

    @property
    def nbytes(self) -> int:
        return int(self.ids.nbytes + self.levels.nbytes + self.seen.nbytes)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(getattr(self, name)) for name in ("ids", "levels", "seen")}

    def load_state_dict(self, state: dict[str, torch.Tensor], vocab_size: int) -> None:
        """Load saved rows. Raises UserError if a shape, an id or a level is out of range."""
        for name, current in self.state_dict().items():
            saved = state.get(name)
            if saved is None or saved.shape != current.shape or saved.dtype != current.dtype:
                raise UserError(f"start: the saved rows are of another vocabulary, k or size ({name})")
        if not 0 <= int(state["ids"].min()) <= int(state["ids"].max()) < vocab_size:
            raise UserError(f"start: the saved rows hold ids outside the vocabulary of {vocab_size}")
        if int(state["levels"].max()) >= LEVELS:
            raise UserError(f"start: the saved rows hold levels beyond {LEVELS - 1}")
        for name in self.state_dict():
            getattr(self, name)[:] = state[name].numpy()


class PairRows(TokenRows):
    """A row a pair of tokens, in a table of fixed size: the newest pair takes the place of any other with its hash.

    Attributes:
        keys: int64 (size,), the pair that a row is of: its first token times 2^32, and its second.
        shift: of the pair's hash, which leaves the row.

    Args:
        size: rows, a power of two; a row takes 9 + 5 k bytes.

    Raises:
        UserError: the size is none.
    """

    def __init__(self, size: int, k: int) -> None:
        if not isinstance(size, int) or not 2 <= size <= MAX_PAIRS or size & (size - 1):
            raise UserError(f"method.pairs={size}: must be a power of two from 2 to {MAX_PAIRS}, or 0")
        super().__init__(size, k)
        self.keys = np.zeros(size, dtype=np.int64)
        self.shift = 64 - (size - 1).bit_length()

    def find_pair(self, before: int, token: int) -> int | None:
        """Return the row of a pair; None if it was not seen, or another one has its place."""
        key = before << 32 | token
        row = (key * _ODD & _WORD) >> self.shift
        return row if self.keys[row] == key and self.seen[row] else None

    def write_pairs(self, before: Any, tokens: Any, ids: Any, levels: Any) -> None:
        """Write rows (m, k) for the pairs of `before` and `tokens`, int64 (m,) each, in order."""
        keys = before << 32 | tokens
        rows = (keys.view(np.uint64) * np.uint64(_ODD) >> np.uint64(self.shift)).astype(np.int64)
        self.keys[rows] = keys
        self.write(rows, ids, levels)

    def reset(self) -> None:
        super().reset()
        self.keys[:] = 0

    @property
    def nbytes(self) -> int:
        return super().nbytes + int(self.keys.nbytes)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return super().state_dict() | {"keys": torch.from_numpy(self.keys)}
