"""How many nodes a draft is to have: as many as promise most tokens a second on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import UserError

Likelihoods = Sequence[float] | NDArray[np.float64]
MEMORY = 64.0  # drafts whose speed is remembered
# A draft of n nodes also writes n rows, which later drafts live on: what is accepted grows with (1 + n) to this power,
# as with recycling's trees for the machine, where it was measured.
FILLING = 0.2


class MachineSize:
    """Chooses a size for each draft, so that all of them together give most expected tokens a second.

    The expected tokens of n nodes are the root and the likelihoods of the n likeliest nodes, so a step on text that is
    copied has many nodes, and one where nothing is known has few. T(n) is the machine's, measured once. What is to be
    greatest is the tokens of all steps over the seconds of all steps, so a step takes the n with the greatest
    tokens - speed * T(n), where speed is that of the steps before it (Dinkelbach's way to the best quotient), and the
    tokens are those of later drafts, too, that its rows help to find.

    Args:
        seconds: T(n) of a whole step by nodes below the root; must hold 0.
        plain_seconds: of a step that neither drafts nor learns, for the prediction.
        budget: at most so many nodes.

    Raises:
        UserError: no step time for 0 nodes, or a negative budget.
    """

    def __init__(self, seconds: Mapping[int, float], plain_seconds: float, budget: int) -> None:
        if budget < 0 or 0 not in seconds:
            raise UserError(f"tree=auto: needs a budget of at least 0 (is {budget}) and the step time of 0 nodes")
        self.sizes = sorted(n for n in seconds if n <= budget)
        self.plain_seconds = plain_seconds
        self._seconds = np.array([seconds[n] for n in self.sizes])
        self._taught = np.log1p(self.sizes)
        self._place = {n: i for i, n in enumerate(self.sizes)}
        self.reset()

    def reset(self) -> None:
        """Nothing was chosen yet."""
        self._expected = np.zeros(len(self.sizes))  # tokens of all drafts by size, as far as each was grown
        self._used = np.zeros(len(self.sizes), dtype=np.int64)  # drafts by size
        self._predicted = np.zeros(2)  # tokens and seconds of all drafts, each as foreseen
        self._lately = np.array([1.0, self._seconds[0]])  # the same of the last MEMORY drafts or so

    @property
    def _costs(self) -> Any:
        """Of each size: the tokens decoded in its time at the speed of the drafts before, less what it teaches."""
        tokens, seconds = self._lately
        return tokens / seconds * self._seconds - FILLING * (tokens - 1) * self._taught

    def enough(self, likelihoods: Likelihoods, following: float) -> bool:
        """Whether no larger size can be the best one, however likely its nodes: at most as likely as the next one is.

        Args:
            likelihoods: of the root, 1, and of the nodes so far, the likeliest first.
            following: of the next node.
        """
        at = self._place.get(len(likelihoods) - 1)
        if at is None:  # looked at where a size is reached
            return False
        tokens = np.cumsum(likelihoods)[self.sizes[: at + 1]]
        most = tokens[-1] + following * (np.array(self.sizes[at + 1 :]) - self.sizes[at])
        worth = tokens - self._costs[: at + 1]
        return not (most - self._costs[at + 1 :] > worth.max()).any()

    def choose(self, likelihoods: Likelihoods) -> int:
        """Nodes below the root; `likelihoods` are those of the root, 1, and of the nodes, the likeliest first."""
        tokens = np.cumsum(likelihoods)[np.minimum(self.sizes, len(likelihoods) - 1)]
        at = int((tokens - self._costs).argmax())
        self._expected += tokens
        self._used[at] += 1
        now = np.array([tokens[at], self._seconds[at]])
        self._predicted += now
        self._lately += (now - self._lately) / MEMORY
        return min(self.sizes[at], len(likelihoods) - 1)

    def describe(self) -> dict[str, Any]:
        """What was measured, chosen and promised, as of recycling's tree for the machine."""
        tokens, seconds = self._predicted.tolist()
        expected = self._expected / max(self._used.sum(), 1)
        return {
            "sizes": self.sizes,
            "step_seconds": self._seconds.tolist(),
            "plain_seconds": self.plain_seconds,
            "expected_accepted": (expected - 1).tolist(),
            "predicted_speedup_by_size": (self.plain_seconds * expected / self._seconds).tolist(),
            "chosen": self.sizes[int(self._used.argmax())],
            "choice": "most often",
            "steps_by_size": self._used.tolist(),
            "predicted_speedup": self.plain_seconds * tokens / seconds if seconds else None,
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`size_used`, int64: drafts by size; `size_expectation`, float64."""
        return {
            "size_used": torch.from_numpy(self._used.copy()),
            "size_expectation": torch.from_numpy(np.concatenate((self._expected, self._predicted, self._lately))),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Starts anew from a state that chose no sizes. Raises UserError if it considered others."""
        self.reset()
        if "size_used" not in state:
            return
        if len(state["size_used"]) != len(self.sizes):
            raise UserError("tree=auto: the saved state considered other sizes; start from another one or cold")
        known = state["size_expectation"].numpy().copy()
        self._used, self._expected = state["size_used"].numpy().copy(), known[:-4]
        self._predicted, self._lately = known[-4:-2], known[-2:]
