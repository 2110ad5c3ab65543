"""A tree for the machine: the draft tree follows from measured step times and observed acceptance.

T(n) is measured once for a machine (`draft_size`) or learnt while decoding. The nodes and their number are always
learnt.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..decoding import Drafter, Target, Tree, Verification
from ..decoding.tree import RankPath
from ..sizing.draft_size import FILLING, SIZES, StepCosts, best_size
from ..sizing.online_size import OnlineSize
from .acceptance import MEMORY_VISITS, Acceptance
from .drafter import RecyclingSession, TokenRecycling
from .templates import best_order

RECONSIDER_EVERY = 16  # steps between two choices of a size
REORDER = 32  # the nodes are sorted anew at this step, and at 4, 16, 64, ... times as many
PROBE_EVERY = 16  # steps between two trials of a larger tree,
PROBE_EVERY_IDLE = 64  # and where drafting does not pay, as a trial then costs most
PROBE_UP = 3  # sizes that a trial is larger by
LEARN_STEPS, LEARN_NODES = 24, 24  # the first steps use this many nodes, whatever the power law promises
RENEW_EVERY = 4  # steps between two choices while T(n) is learnt, in its first steps
MAX_FILL_GAIN = 1.25  # while T(n) is learnt: the most that a filled matrix is expected to add,
FIRST_NODES = 4  # and about the nodes of the first drafts
SWITCH_GAIN = 1.02  # a change of size must promise this much
# Acceptance grows as the matrix fills: by the number of steps, to the power FILLING. The choice is made for the matrix
# as it will be after so many steps; else an empty one looks as if drafting did not pay, small trees are chosen, and the
# matrix stays empty.
HORIZON = 1024
LONGEST_CHAIN = 12  # chains of first candidates are considered down to this depth


class AutoRecycling(TokenRecycling):
    """Token Recycling with a tree of the best n nodes; their order and n are learnt while decoding.

    It starts from the published tree's nodes, most likely first. The order changes rarely, so that few topologies
    are ever compiled or captured; within an order the trees are nested, and n follows acceptance closely.

    Args:
        step_seconds: measured T(n) by nodes below the root; must hold 0. None: it is learnt while decoding.
        plain_seconds: of a step that neither drafts nor learns, for the prediction; default T(0).
        budget: at most so many nodes.
        sizing: what learns it, if other methods share it.
        others: as TokenRecycling.

    Raises:
        UserError: no step time for 0 nodes, or a negative budget.
    """

    sizing: OnlineSize | None = None

    def __init__(
        self,
        vocab_size: int,
        *,
        step_seconds: Mapping[int, float] | None = None,
        plain_seconds: float | None = None,
        budget: int = 80,
        k: int = 8,
        recycle_prompt: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int64,
        update: str = "all",
        eos: Collection[int] = (),
        sizing: OnlineSize | None = None,
    ) -> None:
        if step_seconds is None:
            self.sizing = sizing or OnlineSize(budget, torch.device(device))
        self.costs = self.sizing or StepCosts(step_seconds or {}, plain_seconds, budget)
        self.sizes = self.costs.sizes
        self._first_index = sum(n <= LEARN_NODES for n in self.sizes) - 1  # index of the size to begin with
        self.acceptance = Acceptance(considered_paths(k))
        self._first_order = [self.acceptance.rank_paths.index(path) for path in best_order(self.sizes[-1], k)]
        self._order = list(self._first_order)
        self._trees: dict[tuple[int, ...], Tree] = {}
        device = torch.device(device)
        self.largest = self._tree_of(len(self.sizes) - 1, device)
        settings = dict(k=k, recycle_prompt=recycle_prompt, device=device, dtype=dtype, update=update, eos=eos)
        super().__init__(vocab_size, self.largest, **settings)  # type: ignore[arg-type]
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.acceptance.reset()
        self.costs.reset()
        self._order = list(self._first_order)
        self._steps, self._index = 0, 0  # steps seen; index of the size in use
        begin = self.sizes[self._first_index] if self.sizing is None else FIRST_NODES
        self._mean_log_size = math.log1p(begin)  # moving mean of log(1 + nodes)
        self._expected = self._expect()

    @property
    def size(self) -> int:
        """Nodes below the root in the current tree."""
        return self.sizes[self._index]

    def expected(self) -> list[float]:
        """Return E(n) by size: expected accepted drafts a step, as of the last choice."""
        return self._expected

    def predicted_speedup(self) -> list[float]:
        """Return the predicted decoding speed by size, over plain decoding on the same engine."""
        return self.costs.speedups([1 + e for e in self._expected])

    def describe(self) -> dict[str, Any]:
        nodes = [list(self.acceptance.rank_paths[i]) for i in self._order[: self.size]]
        tokens = [1 + e for e in self._expected]
        return self.costs.promised(tokens, self._expected, chosen=self.size, chosen_nodes=nodes)

    def session(self) -> AutoSession:
        return AutoSession(self)

    def choose(self) -> None:
        """Before a step: choose its tree."""
        index = self._index
        if self.sizing is not None:
            index = self._online(self.sizing)
        elif self._steps < LEARN_STEPS:
            index = self._first_index
        elif self._steps == LEARN_STEPS or self._steps % RECONSIDER_EVERY == 1 or is_reorder(self._steps):
            index = self._reconsider()
        elif self._steps % (PROBE_EVERY if index else PROBE_EVERY_IDLE) == 0:
            index = min(index + PROBE_UP, len(self.sizes) - 1)
        tree = self._tree_of(index, self.device)
        if self.tree is not tree:
            self.use_tree(tree)

    def account(self, verification: Verification) -> None:
        """After a step: learn from it."""
        tree = verification.draft.tree
        index = self.sizes.index(len(tree) - 1)
        if self.sizing is None:  # else `sizing` counts, which knows the time
            self.costs.count(index, 1 + self._expected[index])
        self._index = index if self.sizing is not None else self._index
        self._steps += 1
        self._mean_log_size += (math.log1p(len(tree) - 1) - self._mean_log_size) / MEMORY_VISITS
        self.acceptance.update(tree, verification.node)

    def _online(self, sizing: OnlineSize) -> int:
        """Return the size by the step times learnt so far; update expectations, often in the first steps."""
        every = RENEW_EVERY if self._steps <= RENEW_EVERY * RECONSIDER_EVERY else RECONSIDER_EVERY
        if self._steps and self._steps % every == 0:
            self._renew()
        fill_gain = min(self._fill_gain, MAX_FILL_GAIN)
        return sizing.best([1 + e * fill_gain for e in self._expected])

    @property
    def _fill_gain(self) -> float:
        """Expected acceptance with a filled matrix over that of now."""
        return math.pow(max(HORIZON / max(self._steps, 1), 1.0), FILLING)

    def _renew(self) -> None:
        """Update order and expectation by what was accepted so far."""
        p = self.acceptance.probabilities()
        if is_reorder(self._steps):
            self._order = sorted(range(len(p)), key=lambda i: (-p[i], i))[: self.sizes[-1]]  # a child is never likelier
        self._expected = self._expect()

    def _reconsider(self) -> int:
        self._renew()
        tokens, seconds = [1 + e * self._fill_gain for e in self._expected], self.costs.seconds
        best = best_size(tokens, seconds)
        if tokens[best] / seconds[best] > SWITCH_GAIN * (tokens[self._index] / seconds[self._index]):
            self._index = best
        return self._index

    def _expect(self) -> list[float]:
        p = self.acceptance.probabilities()
        total = [0.0, *itertools.accumulate(p[i] for i in self._order)]
        return [total[n] * math.exp(FILLING * (math.log1p(n) - self._mean_log_size)) for n in self.sizes]

    def _tree_of(self, index: int, device: torch.device) -> Tree:
        """Return the tree of a size in the current order; built when first used."""
        nodes = tuple(self._order[: self.sizes[index]])
        if nodes not in self._trees:
            self._trees[nodes] = Tree.from_rank_paths(self.acceptance.rank_paths[i] for i in nodes).on(device)
        return self._trees[nodes]

    def state_dict(self) -> dict[str, torch.Tensor]:
        learnt = {
            "order": torch.tensor(self._order, dtype=torch.int64),
            "clock": torch.tensor([self._steps, self._index, *self.costs.used]),
            "expectation": torch.tensor(
                [*self._expected, *self.costs.predicted, self._mean_log_size], dtype=torch.float64
            ),
        }
        if self.sizing is not None:
            learnt |= self.sizing.state_dict()
        return super().state_dict() | self.acceptance.state_dict() | learnt

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load a saved state, or a matrix alone: then the choice starts from the power law.

        Of a state with other sizes the matrix and what was accepted are kept, where sizes are found while decoding.
        Raises UserError elsewhere.
        """
        super().load_state_dict({"candidates": state["candidates"]} if "candidates" in state else state)
        if "clock" not in state:
            return
        self.acceptance.load_state_dict(state)
        steps, index, *used = state["clock"].tolist()
        *expected, tokens, seconds, mean_log_size = state["expectation"].tolist()
        if not self.costs.load(used if len(state["order"]) == self.sizes[-1] else [], [tokens, seconds]):
            return
        self._order, self._steps, self._index = state["order"].tolist(), steps, index
        self._expected, self._mean_log_size = expected, mean_log_size
        if self.sizing is not None:
            self.sizing.load_state_dict(state)


class AutoSession(RecyclingSession):
    """A sequence without state of its own: all that is learnt is the method's."""

    method: AutoRecycling

    def choose(self) -> None:
        self.method.choose()

    def account(self, verification: Verification) -> None:
        self.method.account(verification)


def considered_paths(k: int) -> tuple[RankPath, ...]:
    """List the rank paths among which nodes are chosen: the most likely by the power law, and chains of rank 0."""
    chains = [(0,) * depth for depth in range(1, LONGEST_CHAIN + 1)]
    ends = [(*path, rank) for path in chains for rank in range(min(2, k))]
    paths = {*best_order(2 * SIZES[-1], k), *chains, *ends}
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def is_reorder(steps: int) -> bool:
    """True if the nodes are sorted anew at this step: 32, 128, 512, ..."""
    while steps > REORDER and steps % 4 == 0:
        steps //= 4
    return steps == REORDER


def best_of(target: Target, k: int, n: int) -> Drafter:
    """Make Token Recycling with the n best nodes, for timing."""
    return TokenRecycling(target.vocab_size, Tree.from_rank_paths(best_order(n, k)), k=k, device=target.device)
