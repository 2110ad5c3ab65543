"""The number of nodes of a draft: as many as promise most tokens a second on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..sizing import draft_size
from ..sizing.draft_size import StepCosts

Likelihoods = Sequence[float] | NDArray[np.float64]
MEMORY_DRAFTS = 64.0  # drafts over which the speed is averaged


class MachineSize:
    """Chooses a size for each draft, so that all of them together give most expected tokens a second.

    The expected tokens of n nodes are the root and the likelihoods of the n most likely nodes, so a step on
    copied text has many nodes, and one without likely candidates has few. T(n) is the machine's, measured once. The aim
    is the most tokens of all steps over the seconds of all steps, so a step takes the n with the greatest
    tokens - speed * T(n), where speed is that of the steps before it (Dinkelbach's way to the best quotient), and the
    tokens are those of later drafts, too, that its rows help to find.

    Args:
        costs: T(n), recorded or learnt while decoding.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs, self.sizes = costs, costs.sizes
        self._log_sizes = np.log1p(self.sizes)
        self._place = {n: i for i, n in enumerate(self.sizes)}
        self.reset()

    def reset(self) -> None:
        """Forget all choices."""
        self.costs.reset()
        self._expected = np.zeros(len(self.sizes))  # tokens of all drafts by size, as far as each was grown
        self._recent = [
            1.0,
            self.costs.seconds[0],
        ]  # tokens and seconds of the last MEMORY_DRAFTS drafts or so, as foreseen

    @property
    def _costs(self) -> Any:
        """Cost by size: the tokens decoded in its time at the recent speed, less the tokens that its rows add later."""
        (tokens, seconds), end = self._recent, self.costs.largest + 1
        times = np.array(self.costs.seconds[:end])
        return tokens / seconds * times - draft_size.FILLING * (tokens - 1) * self._log_sizes[:end]

    def enough(self, likelihoods: Likelihoods, following: float) -> bool:
        """True if no larger size can be the best one, even with all its nodes as likely as the next one.

        Args:
            likelihoods: of the root, 1, and of the nodes so far, best first.
            following: of the next node.
        """
        index = self._place.get(len(likelihoods) - 1)
        if index is None:  # checked only where a size is reached
            return False
        tokens = np.cumsum(likelihoods)[self.sizes[: index + 1]]
        costs = self._costs
        most = tokens[-1] + following * (np.array(self.sizes[index + 1 : len(costs)]) - self.sizes[index])
        worth = tokens[: len(costs)] - costs[: index + 1]
        return not (most - costs[index + 1 :] > worth.max()).any()

    def choose(self, likelihoods: Likelihoods) -> int:
        """Return the nodes below the root; `likelihoods` are of the root, 1, and of the nodes, best first."""
        tokens = np.cumsum(likelihoods)[np.minimum(self.sizes, len(likelihoods) - 1)]
        costs = self._costs
        index = int((tokens[: len(costs)] - costs).argmax())
        self._expected += tokens
        chosen = float(tokens[index]), self.costs.seconds[index]
        self.costs.count(index, chosen[0])
        self._recent = [mean + (new - mean) / MEMORY_DRAFTS for mean, new in zip(self._recent, chosen, strict=True)]
        return min(self.sizes[index], len(likelihoods) - 1)

    def describe(self) -> dict[str, Any]:
        """Return what was measured, chosen and predicted, as AutoRecycling does."""
        used = self.costs.used
        expected = self._expected / max(sum(used), 1)
        most_used = self.sizes[int(np.argmax(used))]
        return self.costs.promised(expected.tolist(), (expected - 1).tolist(), chosen=most_used, choice="most often")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`size_used`, int64: drafts by size; `size_expectation`, float64."""
        return {
            "size_used": torch.tensor(self.costs.used),
            "size_expectation": torch.from_numpy(np.concatenate((self._expected, self.costs.predicted, self._recent))),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load saved counts; reset if the state has none.

        With those of other sizes it is reset, too, where sizes are found while decoding. Raises UserError elsewhere.
        """
        self.reset()
        if "size_used" not in state:
            return
        saved = state["size_expectation"].tolist()
        if self.costs.load(state["size_used"].tolist(), saved[-4:-2]):
            self._expected, self._recent = np.array(saved[:-4]), saved[-2:]
