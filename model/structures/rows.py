"""Unigram and bigram tables: the target's top candidates after a token, and after a pair, when last seen there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..engine.drafter import check_ids
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

    kind = "token"  # its tensors' names in a state begin with it
    fields: tuple[str, ...] = ("ids", "levels", "seen")

    def __init__(self, vocab_size: int, k: int, rows: int | None = None) -> None:
        rows = vocab_size if rows is None else rows
        self.vocab_size = vocab_size
        self.ids = np.zeros((rows, k), dtype=np.int32)
        self.levels = np.zeros((rows, k), dtype=np.uint8)
        self.seen = np.zeros(rows, dtype=bool)

    def reset(self) -> None:
        for tensor in self.state_dict().values():
            tensor.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {f"{self.kind}_{name}": torch.from_numpy(getattr(self, name)) for name in self.fields}

    def check_state(self, state: dict[str, torch.Tensor]) -> None:
        """Raise UserError if a shape, an id or a level is out of range."""
        for name, current in self.state_dict().items():
            saved = state.get(name, torch.zeros(0))
            if saved.shape != current.shape or saved.dtype != current.dtype:
                raise UserError(f"start: the saved rows are of another vocabulary, k or size ({name})")
        check_ids("rows", state[f"{self.kind}_ids"], self.vocab_size)
        if bool((state[f"{self.kind}_levels"] >= LEVELS).any()):
            raise UserError(f"start: the saved rows hold levels beyond {LEVELS - 1}")

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, current in self.state_dict().items():
            current.copy_(state[name])


class PairRows(TokenRows):
    """A row a pair of tokens, in a table of fixed size: the newest pair takes the place of any other with its hash.

    Attributes:
        keys: int64 (size,), the pair that a row is of: its first token times 2^32, and its second.
        shift: of the pair's hash, which leaves the row.

    Args:
        size: rows, a power of two, or 0; a row takes 9 + 5 k bytes.
    """

    kind, fields = "pair", ("ids", "levels", "seen", "keys")

    def __init__(self, vocab_size: int, k: int, size: int) -> None:
        if not isinstance(size, int) or size == 1 or not 0 <= size <= MAX_PAIRS or size & (size - 1):
            raise UserError(f"method.pairs={size}: must be a power of two from 2 to {MAX_PAIRS}, or 0")
        super().__init__(vocab_size, k, size)
        self.keys = np.zeros(size, dtype=np.int64)
        self.shift = 64 - max(size - 1, 1).bit_length()
