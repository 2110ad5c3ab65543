"""Acceptance probability of a candidate: the accepted share of candidates of its kind, learnt while decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .rows import LEVELS

# Sources of a candidate. PAIR: the row of its parent's pair. TOKEN: the row of its parent's token, if the pair has no
# row. BACKOFF: the row of the token, if the pair's row lacks the candidate. SIBLING_CHILD: what followed the root's
# rejected siblings. SIBLING: these siblings themselves. COPIED: the text alone.
PAIR, TOKEN, BACKOFF, SIBLING_CHILD, SIBLING, COPIED = range(6)
ALONE, AND_SIBLING_CHILD, AND_SIBLING = range(3)  # if a sibling source suggests it as well, which one
MATCH_BUCKETS = (
    8  # of the length of the match that is copied from: 0 (no match), 1, 2, 3, 4, 5 to 7, 8 to 15, 16 and more tokens
)

# The prior, worth PRIOR candidates a cell: acceptance of a copied token by bucket, and of a source's candidates over
# the target's probability. From 48 questions of Spec-Bench on a real model, apart from those reported.
PRIOR = 4.0
COPIED_SHARE = (0.0, 0.0, 0.2, 0.45, 0.55, 0.7, 0.85, 0.85)
TRUST = {PAIR: 0.9, TOKEN: 0.6, BACKOFF: 0.1, SIBLING_CHILD: 0.3, SIBLING: 0.1, COPIED: 0.0}


def bucket(match: int) -> int:
    """Return the bucket of a match of so many tokens."""
    return match if match < 5 else 5 if match < 8 else 6 if match < 16 else 7


def cell(source: int, suggested: int, match: int, copied: bool, level: int = 0) -> int:
    """Return the number of a kind of candidates. `match` is a bucket."""
    return (((source * 3 + suggested) * MATCH_BUCKETS + match) * 2 + copied) * LEVELS + level


def is_alone(at: int) -> bool:
    """True if candidates of this cell come from no sibling source."""
    return at // cell(PAIR, AND_SIBLING_CHILD, 0, False) % 3 == ALONE


FIRST_CELL = [[cell(source, ALONE, match, False) for match in range(MATCH_BUCKETS)] for source in TRUST]  # of level 0
CELLS = cell(COPIED, AND_SIBLING, MATCH_BUCKETS - 1, True, LEVELS - 1) + 1


def _guesses() -> Any:
    """float64 (CELLS,)."""
    guesses = np.zeros(CELLS)
    for source, trust in TRUST.items():
        for suggested in (ALONE, AND_SIBLING_CHILD, AND_SIBLING):
            for match, copied_share in enumerate(COPIED_SHARE):
                for level in range(LEVELS):
                    drawn = (1 - copied_share) * trust * 2.0 ** -(level + 0.5)
                    guesses[cell(source, suggested, match, False, level)] = drawn
                    guesses[cell(source, suggested, match, True, level)] = max(copied_share, drawn)
    return guesses


class Weights:
    """The weight of every cell.

    Attributes:
        seen, accepted: by cell, float64 (CELLS,): candidates, and those of them that were the next token.
        probs: by cell, float64 (CELLS,): accepted / seen.
        probs_view: the same memory, for reading single cells fast.

    Args:
        learning: False: the prior holds for good.
    """

    _prior = _guesses()

    def __init__(self, learning: bool = True) -> None:
        self.learning = learning
        self.reset()

    def reset(self) -> None:
        self._set(np.full(CELLS, PRIOR), PRIOR * self._prior, self._prior.copy())

    def _set(self, seen: Any, accepted: Any, probs: Any) -> None:
        self.seen, self.accepted, self.probs = seen, accepted, probs
        self.probs_view = memoryview(probs)

    def learn(self, cells: list[int], accepted: list[int]) -> None:
        """Count the cells of candidates whose next token is known now, and the cells of those that were accepted."""
        if not self.learning:
            return
        changed = np.array(cells, dtype=np.int64)
        np.add.at(self.seen, changed, 1.0)
        np.add.at(self.accepted, accepted, 1.0)
        self.probs[changed] = self.accepted[changed] / self.seen[changed]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`weights`, float64 (2, CELLS): seen and accepted."""
        return {"weights": torch.from_numpy(np.stack((self.seen, self.accepted)))}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load saved weights. Raises UserError if the state has none that fit."""
        saved = state.get("weights")
        if saved is None or saved.shape != (2, CELLS) or not bool(((saved[1] >= 0) & (saved[1] <= saved[0])).all()):
            raise UserError("start: the saved state has no weights of this method")
        seen, accepted = saved.double().numpy().copy()
        self._set(seen, accepted, accepted / seen)
