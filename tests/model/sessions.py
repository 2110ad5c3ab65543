"""Sessions looked at from within."""

from collections.abc import Callable
from typing import Any

import torch

from model.engine import Drafter, Session


class Scores:
    """Scores that are equal as far as float16 tells: a forward of another shape gives other last bits of logits."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores.float()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scores) or other.scores.shape != self.scores.shape:
            return False
        return torch.allclose(self.scores, other.scores, rtol=0, atol=1e-3)

    __hash__ = None  # type: ignore[assignment]


def comparable(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A drafter's state to compare with `==`: exactly, but for scores."""
    return {
        name: Scores(tensor.clone()) if name.endswith("_scores") else tensor.tolist()
        for name, tensor in state.items()
    }


def each_session(drafter: Drafter, change: Callable[[Any], None]) -> None:
    """Every session of this drafter, from now on, is changed by this before it begins."""
    make = drafter.session

    def session() -> Session:
        made = make()
        change(made)
        return made

    drafter.session = session  # type: ignore[method-assign]
