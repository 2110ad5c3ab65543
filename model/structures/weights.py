"""Acceptance probability of a candidate: the accepted share of candidates of its kind, learnt while decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .dynamic_loops import BACKOFF, COPIED, KINDS, LEVELS, MATCHES, PAIR, SIBLING, SIBLING_CHILD, TOKEN

# The prior, worth PRIOR candidates a kind: acceptance of a copied token by match (see MATCHES), and of a source's
# candidates over the target's probability. From 48 questions of Spec-Bench on a real model, apart from those reported.
PRIOR = 4.0
COPIED_SHARE = (0.0, 0.0, 0.2, 0.45, 0.55, 0.7, 0.85, 0.85)
TRUST = {PAIR: 0.9, TOKEN: 0.6, BACKOFF: 0.1, SIBLING_CHILD: 0.3, SIBLING: 0.1, COPIED: 0.0}


def _guesses() -> Any:
    """float64 KINDS."""
    guesses = np.zeros(KINDS)
    probs = np.array([2.0 ** -(level + 0.5) for level in range(LEVELS)])  # the target's
    for source, trust in TRUST.items():
        for match in range(MATCHES):
            expected = (1 - COPIED_SHARE[match]) * trust * probs
            guesses[source, :, match, 0] = expected
            guesses[source, :, match, 1] = np.maximum(COPIED_SHARE[match], expected)
    return guesses


class Weights:
    """The weight of every kind of candidates, which `loops` reads and learns, unless `learning` is False."""

    _prior = _guesses()

    def __init__(self, learning: bool = True) -> None:
        self.learning = learning
        self.reset()

    def reset(self) -> None:
        # float64 KINDS: candidates, those of them that were the next token, and the quotient
        self.seen, self.accepted, self.probs = np.full(KINDS, PRIOR), PRIOR * self._prior, self._prior.copy()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`weights`, float64 (2, kinds): seen and accepted."""
        return {"weights": torch.from_numpy(np.stack((self.seen, self.accepted))).flatten(1)}

    def check_state(self, state: dict[str, torch.Tensor]) -> None:
        saved = state.get("weights", torch.zeros(0))
        if saved.shape != (2, self.probs.size) or bool(
            ((saved[1] < 0) | (saved[1] > saved[0]) | ~(saved[0] > 0)).any()
        ):
            raise UserError("start: the saved state has no weights of this method")

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.seen, self.accepted = state["weights"].double().numpy().copy().reshape(2, *KINDS)
        self.probs = self.accepted / self.seen
