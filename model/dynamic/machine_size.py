"""How many nodes a draft is to have: as many as promise most tokens a second on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..sizing import draft_size
from ..sizing.draft_size import StepCosts

Likelihoods = Sequence[float] | NDArray[np.float64]
MEMORY = 64.0  # drafts whose speed is remembered


class MachineSize:
    """Chooses a size for each draft, so that all of them together give most expected tokens a second.

    The expected tokens of n nodes are the root and the likelihoods of the n likeliest nodes, so a step on text that is
    copied has many nodes, and one where nothing is known has few. T(n) is the machine's, measured once. What is to be
    greatest is the tokens of all steps over the seconds of all steps, so a step takes the n with the greatest
    tokens - speed * T(n), where speed is that of the steps before it (Dinkelbach's way to the best quotient), and the
    tokens are those of later drafts, too, that its rows help to find.

    Args:
        costs: T(n), recorded or learnt while decoding.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs, self.sizes = costs, costs.sizes
        self._taught = np.log1p(self.sizes)
        self._place = {n: i for i, n in enumerate(self.sizes)}
        self.reset()

    def reset(self) -> None:
        """Nothing was chosen yet."""
        self.costs.reset()
        self._expected = np.zeros(len(self.sizes))  # tokens of all drafts by size, as far as each was grown
        self._lately = [1.0, self.costs.seconds[0]]  # tokens and seconds of the last MEMORY drafts or so, as foreseen

    @property
    def _costs(self) -> Any:
        """Of each size up to the largest: the tokens decoded in its time at the speed of the drafts before, less what
        it teaches.
        """
        (tokens, seconds), end = self._lately, self.costs.largest + 1
        times = np.array(self.costs.seconds[:end])
        return tokens / seconds * times - draft_size.FILLING * (tokens - 1) * self._taught[:end]

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
        costs = self._costs
        most = tokens[-1] + following * (np.array(self.sizes[at + 1 : len(costs)]) - self.sizes[at])
        worth = tokens[: len(costs)] - costs[: at + 1]
        return not (most - costs[at + 1 :] > worth.max()).any()

    def choose(self, likelihoods: Likelihoods) -> int:
        """Nodes below the root; `likelihoods` are those of the root, 1, and of the nodes, the likeliest first."""
        tokens = np.cumsum(likelihoods)[np.minimum(self.sizes, len(likelihoods) - 1)]
        costs = self._costs
        at = int((tokens[: len(costs)] - costs).argmax())
        self._expected += tokens
        now = float(tokens[at]), self.costs.seconds[at]
        self.costs.count(at, now[0])
        self._lately = [mean + (new - mean) / MEMORY for mean, new in zip(self._lately, now, strict=True)]
        return min(self.sizes[at], len(likelihoods) - 1)

    def describe(self) -> dict[str, Any]:
        """What was measured, chosen and promised, as of recycling's tree for the machine."""
        used = self.costs.used
        expected = self._expected / max(sum(used), 1)
        most_used = self.sizes[int(np.argmax(used))]
        return self.costs.promised(expected.tolist(), (expected - 1).tolist(), chosen=most_used, choice="most often")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`size_used`, int64: drafts by size; `size_expectation`, float64."""
        return {
            "size_used": torch.tensor(self.costs.used),
            "size_expectation": torch.from_numpy(np.concatenate((self._expected, self.costs.predicted, self._lately))),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Starts anew from a state that chose no sizes. Raises UserError if it considered others."""
        self.reset()
        if "size_used" not in state:
            return
        known = state["size_expectation"].tolist()
        self.costs.load(state["size_used"].tolist(), known[-4:-2])
        self._expected, self._lately = np.array(known[:-4]), known[-2:]
