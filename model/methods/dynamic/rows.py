"""The tables that dynamic recycling learns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...compiled import NONE
from ...engine import State, checked
from ...engine.contract.saved import MAX_COUNT
from ...errors import UserError
from .dynamic_loops import BACKOFF, COPIED, KINDS, LEVELS, PAIR, SIBLING, SIBLING_CHILD, TOKEN, Rows

MAX_PAIRS = 1 << 24
# The prior counts as PRIOR candidates per kind: acceptance of a copied token by match (see
# MATCHES), and a source's acceptance over the target's probability. From 48 questions of Spec-Bench
# on a real model, none of them reported.
PRIOR = 4.0
COPIED_SHARE = (0.0, 0.0, 0.2, 0.45, 0.55, 0.7, 0.85, 0.85)
TRUST = {PAIR: 0.9, TOKEN: 0.6, BACKOFF: 0.1, SIBLING_CHILD: 0.3, SIBLING: 0.1, COPIED: 0.0}


def on_host(best: Tensor, log_probs: Tensor) -> tuple[Any, Any]:
    """Convert candidates and their log-probs, (n, k) each, to int64 and float32 on the host.

    On a device the log-probs are rounded towards 0, so that one transfer brings both.
    """
    if best.device.type != "cpu":
        both = torch.cat((best, log_probs.clamp(1 - LEVELS, 0).long()), 1).cpu()  # (n, 2 k)
        best, log_probs = both.chunk(2, 1)
    return np.ascontiguousarray(best.numpy()), np.ascontiguousarray(log_probs.float().numpy())


class CandidateRows:
    """Candidates and their levels by token, and by pair of tokens in a table of fixed size.

    A new pair replaces another one with its hash; a row takes 8 + 5 k bytes.
    """

    def __init__(self, vocab_size: int, k: int, pairs: int, eos: Collection[int] = ()) -> None:
        powers = (1 << bits for bits in range(1, MAX_PAIRS.bit_length()))
        if not isinstance(pairs, int) or pairs not in (0, *powers):
            raise UserError(
                f"method.pairs={pairs}: must be a power of two from 2 to {MAX_PAIRS}, or 0"
            )
        count = vocab_size + pairs
        ends = np.zeros(vocab_size, dtype=bool)
        ends[[end for end in eos if end < vocab_size]] = True
        self.rows = Rows(
            ids=np.zeros((count, k), dtype=np.int32),
            levels=np.zeros((count, k), dtype=np.uint8),
            keys=np.full(count, NONE, dtype=np.int64),
            shift=64 - max(pairs - 1, 1).bit_length(),
            ends=ends,
        )
        self.arrays = tuple(self.rows)

    def reset(self) -> None:
        self.rows.ids[:] = 0
        self.rows.levels[:] = 0
        self.rows.keys[:] = NONE

    def state_dict(self) -> State:
        fields = ("ids", "levels", "keys")
        return {f"row_{name}": torch.from_numpy(getattr(self.rows, name)) for name in fields}

    def read(self, state: State) -> State:
        last = len(self.rows.ends) - 1  # token id
        shape = self.rows.ids.shape
        return {
            "row_ids": checked(state, "row_ids", shape, 0, last),
            "row_levels": checked(state, "row_levels", shape, 0, LEVELS - 1),
            "row_keys": checked(state, "row_keys", shape[:1], NONE, last << 32 | last),
        }

    def load(self, rows: State) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(rows[name])


def _guesses() -> Any:
    guesses = np.zeros(KINDS)
    probs = np.array([2.0 ** -(level + 0.5) for level in range(LEVELS)])  # the target's, by level
    for source, trust in TRUST.items():
        for match, share in enumerate(COPIED_SHARE):
            expected = (1 - share) * trust * probs
            guesses[source, :, match, 0] = expected
            guesses[source, :, match, 1] = np.maximum(share, expected)
    return guesses


class AcceptRates:
    """The accepted share of every kind of candidate.

    Attributes:
        counts: float64 (2, *KINDS): candidates, and those of them that were the next token.
    """

    _prior = _guesses()

    def __init__(self, learning: bool = True) -> None:
        self.learning = learning
        self.counts = np.empty((2, *KINDS))
        self.rates = np.empty(KINDS)
        self.reset()

    def reset(self) -> None:
        self.counts[0] = PRIOR
        self.counts[1] = PRIOR * self._prior
        self.rates[:] = self._prior

    def state_dict(self) -> State:
        return {"counts": torch.from_numpy(self.counts)}

    def read(self, state: State) -> Any:
        counts = checked(state, "counts", self.counts.shape, 0, MAX_COUNT, real=True).numpy()
        if (counts[0] < PRIOR).any() or (counts[1] > counts[0]).any():
            raise UserError("start: the saved counts are damaged")
        return counts

    def load(self, counts: Any) -> None:
        self.counts[:] = counts
        np.divide(self.counts[1], self.counts[0], out=self.rates)
