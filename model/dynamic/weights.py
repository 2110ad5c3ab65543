"""How likely a candidate is to be accepted: the share of candidates like it that were, learnt while decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .rows import LEVELS

# Where a candidate is from: the row of its parent's pair; the row of its parent's token, where there is none of the
# pair; that row, where the pair's lacks the candidate; what followed the root's rejected siblings; the root's siblings
# themselves; nothing but text that is copied.
PAIR, TOKEN, BEHIND, FOLLOWED, SIBLING, COPIED = range(6)
ALONE, AND_FOLLOWED, AND_SIBLING = range(3)  # whether one of the root's two suggests it as well
BUCKETS = 8  # of the match whose continuation is copied: 0 (no match), 1, 2, 3, 4, 5 to 7, 8 to 15, 16 and more tokens

# Before anything is learnt, as if each cell had seen PRIOR candidates: what a copied token is worth by bucket, and what
# a source's probabilities are worth. From 48 questions of Spec-Bench on a real model, apart from those reported.
PRIOR = 4.0
COPIED_SHARE = (0.0, 0.0, 0.2, 0.45, 0.55, 0.7, 0.85, 0.85)
TRUST = {PAIR: 0.9, TOKEN: 0.6, BEHIND: 0.1, FOLLOWED: 0.3, SIBLING: 0.1, COPIED: 0.0}


def bucket(match: int) -> int:
    """Of a match of so many tokens."""
    return match if match < 5 else 5 if match < 8 else 6 if match < 16 else 7


def cell(source: int, suggested: int, match: int, copied: bool, level: int = 0) -> int:
    """The number of a kind of candidates. `match` is a bucket."""
    return (((source * 3 + suggested) * BUCKETS + match) * 2 + copied) * LEVELS + level


def is_alone(at: int) -> bool:
    """True if candidates of this cell come from no sibling source."""
    return at // cell(PAIR, AND_FOLLOWED, 0, False) % 3 == ALONE


FIRST = [[cell(source, ALONE, match, False) for match in range(BUCKETS)] for source in TRUST]  # of level 0
CELLS = cell(COPIED, AND_SIBLING, BUCKETS - 1, True, LEVELS - 1) + 1


def _guesses() -> Any:
    """float64 (CELLS,)."""
    guesses = np.zeros(CELLS)
    for source, trust in TRUST.items():
        for suggested in (ALONE, AND_FOLLOWED, AND_SIBLING):
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
        now: by cell, float64 (CELLS,).
        each: the same memory, for reading one by one.

    Args:
        learning: False: the guesses hold for good.
    """

    _first = _guesses()

    def __init__(self, learning: bool = True) -> None:
        self.learning = learning
        self.reset()

    def reset(self) -> None:
        self._take(np.full(CELLS, PRIOR), PRIOR * self._first, self._first.copy())

    def _take(self, seen: Any, accepted: Any, now: Any) -> None:
        self.seen, self.accepted, self.now = seen, accepted, now
        self.each = memoryview(now)

    def learn(self, cells: list[int], accepted: list[int]) -> None:
        """Candidates of nodes whose next token is known now: their cells, and those of the ones that were it."""
        if not self.learning:
            return
        changed = np.array(cells, dtype=np.int64)
        np.add.at(self.seen, changed, 1.0)
        np.add.at(self.accepted, accepted, 1.0)
        self.now[changed] = self.accepted[changed] / self.seen[changed]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`weights`, float64 (2, CELLS): seen and accepted."""
        return {"weights": torch.from_numpy(np.stack((self.seen, self.accepted)))}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Raises UserError if it is no such table."""
        saved = state.get("weights")
        if saved is None or saved.shape != (2, CELLS) or not bool(((saved[1] >= 0) & (saved[1] <= saved[0])).all()):
            raise UserError("start: the saved state has no weights of this method")
        seen, accepted = saved.double().numpy().copy()
        self._take(seen, accepted, accepted / seen)
