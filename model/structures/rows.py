"""The tables that dynamic recycling learns.

Rows: the target's top candidates after a token, and after a pair of tokens, when last seen there.
Weights: the accepted share of candidates of each kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..engine.drafter import check_ids
from ..errors import UserError
from .dynamic_loops import (
    BACKOFF,
    COPIED,
    KINDS,
    LEVELS,
    MATCHES,
    PAIR,
    SIBLING,
    SIBLING_CHILD,
    TOKEN,
)

MAX_PAIRS = 1 << 24
# The prior counts as PRIOR candidates per kind: acceptance of a copied token by match (see
# MATCHES), and a source's acceptance over the target's probability. From 48 questions of Spec-Bench
# on a real model, none of them reported.
PRIOR = 4.0
COPIED_SHARE = (0.0, 0.0, 0.2, 0.45, 0.55, 0.7, 0.85, 0.85)
TRUST = {PAIR: 0.9, TOKEN: 0.6, BACKOFF: 0.1, SIBLING_CHILD: 0.3, SIBLING: 0.1, COPIED: 0.0}


def on_host(best: torch.Tensor, log_probs: torch.Tensor) -> tuple[Any, Any]:
    """Convert candidates and their log-probs, (n, k) each, to int64 and float32 on the host.

    On a device the log-probs are rounded towards 0, so that one transfer brings both.
    """
    if best.device.type != "cpu":
        both = torch.cat((best, log_probs.clamp(1 - LEVELS, 0).long()), 1).cpu()  # (n, 2 k)
        best, log_probs = both.chunk(2, 1)
    return np.ascontiguousarray(best.numpy()), np.ascontiguousarray(log_probs.float().numpy())


class TokenRows:
    """One row per token: V x k candidates and their levels.

    Empty until the token was seen; the newest visit counts.
    """

    kind = "token"  # the names of its tensors in a saved state begin with this
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
        return {
            f"{self.kind}_{name}": torch.from_numpy(getattr(self, name)) for name in self.fields
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load rows. Raises UserError if a shape, an id or a level is out of range."""
        for name, current in self.state_dict().items():
            saved = state.get(name, torch.zeros(0))
            if saved.shape != current.shape or saved.dtype != current.dtype:
                raise UserError(
                    f"start: the saved rows are of another vocabulary, k or size ({name})"
                )

        check_ids("rows", state[f"{self.kind}_ids"], self.vocab_size)
        if bool((state[f"{self.kind}_levels"] >= LEVELS).any()):
            raise UserError(f"start: the saved rows hold levels beyond {LEVELS - 1}")

        for name, current in self.state_dict().items():
            current.copy_(state[name])


class PairRows(TokenRows):
    """One row per pair of tokens, in a table of fixed size.

    A new pair replaces another one with its hash.

    Attributes:
        keys: int64 (size,), the pair of each row: its first token times 2^32, and its second.
        shift: a pair's hash shifted right by this is its row.

    Args:
        size: rows, a power of two, or 0; a row takes 9 + 5 k bytes.
    """

    kind = "pair"
    fields = ("ids", "levels", "seen", "keys")

    def __init__(self, vocab_size: int, k: int, size: int) -> None:
        powers = (1 << bits for bits in range(1, MAX_PAIRS.bit_length()))
        if not isinstance(size, int) or size not in (0, *powers):
            raise UserError(
                f"method.pairs={size}: must be a power of two from 2 to {MAX_PAIRS}, or 0"
            )
        super().__init__(vocab_size, k, size)
        self.keys = np.zeros(size, dtype=np.int64)
        self.shift = 64 - max(size - 1, 1).bit_length()


def _guesses() -> Any:
    """Return the prior of the weights, float64 KINDS."""
    guesses = np.zeros(KINDS)
    probs = np.array([2.0 ** -(level + 0.5) for level in range(LEVELS)])  # the target's, by level
    for source, trust in TRUST.items():
        for match in range(MATCHES):
            expected = (1 - COPIED_SHARE[match]) * trust * probs
            guesses[source, :, match, 0] = expected
            guesses[source, :, match, 1] = np.maximum(COPIED_SHARE[match], expected)
    return guesses


class Weights:
    """The weight of every kind of candidate.

    `dynamic_loops` reads the weights and, if `learning`, updates them.
    """

    _prior = _guesses()

    def __init__(self, learning: bool = True) -> None:
        self.learning = learning
        self.reset()

    def reset(self) -> None:
        # float64 KINDS: candidates, those of them that were the next token, and the quotient
        self.seen = np.full(KINDS, PRIOR)
        self.accepted = PRIOR * self._prior
        self.probs = self._prior.copy()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`weights`, float64 (2, kinds): seen and accepted."""
        return {"weights": torch.from_numpy(np.stack((self.seen, self.accepted))).flatten(1)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load weights. Raises UserError if there are none."""
        saved = state.get("weights", torch.zeros(0))
        fits = saved.shape == (2, self.probs.size)
        if fits:
            seen, accepted = saved
            possible = (accepted >= 0) & (accepted <= seen) & (seen > 0) & ~seen.isinf()
            fits = bool(possible.all())
        if not fits:
            raise UserError("start: the saved state has no weights of this method")

        self.seen, self.accepted = saved.double().numpy().copy().reshape(2, *KINDS)
        self.probs = self.accepted / self.seen
