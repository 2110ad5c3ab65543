"""Unigram and bigram tables: the target's top candidates after a token, and after a pair, when last seen there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .dynamic_loops import LEVELS

MAX_PAIRS = 1 << 24


def on_host(best: torch.Tensor, bits: torch.Tensor) -> tuple[Any, Any]:
    """Convert candidates and their bits, (n, k) each, to int64 and float32 on the host.

    On a device the bits are rounded down, so that one transfer brings both.
    """
    if best.device.type != "cpu":
        both = torch.cat((best, bits.clamp(0, LEVELS - 1).long()), 1).cpu()  # (n, 2 k)
        best, bits = both.chunk(2, 1)
    return np.ascontiguousarray(best.numpy()), np.ascontiguousarray(bits.float().numpy())


class TokenRows:
    """A row a token: V x k candidates and their levels. Empty until the token was seen; the newest visit counts."""

    def __init__(self, vocab_size: int, k: int) -> None:
        self.ids = np.zeros((vocab_size, k), dtype=np.int32)
        self.levels = np.zeros((vocab_size, k), dtype=np.uint8)
        self.seen = np.zeros(vocab_size, dtype=bool)

    def reset(self) -> None:
        for tensor in self.state_dict().values():
            tensor.zero_()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state_dict().values())

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

    def state_dict(self) -> dict[str, torch.Tensor]:
        return super().state_dict() | {"keys": torch.from_numpy(self.keys)}
