"""Token Recycling with a tree of the best n nodes: their order and n are learnt while decoding."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..engine import Tree, Verification
from ..engine.sizing import MOST, Sizing
from ..engine.tree import RankPath
from .acceptance import Acceptance
from .templates import best_order
from .token_recycling import RecyclingSession, TokenRecycling

REORDER = 32  # the nodes are sorted anew at this step, and at 4, 16, 64, ... times as many
RENEW_EVERY = 4  # steps between two looks at what was accepted
LONGEST_CHAIN = 12  # chains of first candidates are considered down to this depth


class AutoRecycling(TokenRecycling):
    """Token Recycling with a tree of the best n nodes; their order and n are learnt while decoding.

    It starts from the published tree's nodes, most likely first. The order changes rarely, so that few topologies
    are ever compiled or captured; within an order the trees are nested, and n follows acceptance closely.

    Args:
        nodes: auto, or auto:N for at most N.
        sizing: what finds n, if other methods share it.
        others: as TokenRecycling.
    """

    sizing: Sizing

    def __init__(
        self,
        vocab_size: int,
        *,
        nodes: str = "auto",
        k: int = 8,
        recycle_prompt: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int64,
        update: str = "all",
        eos: Collection[int] = (),
        sizing: Sizing | None = None,
    ) -> None:
        device = torch.device(device)
        self.sizing = sizing or Sizing(nodes, device)
        most = self.sizing.sizes[-1]
        self.acceptance = Acceptance(considered_paths(k))
        self._first_order = [self.acceptance.rank_paths.index(path) for path in best_order(most, k)]
        self._order = list(self._first_order)
        self._trees: dict[tuple[int, ...], Tree] = {}
        self.largest = self._tree_of(most, device)
        settings = dict(k=k, recycle_prompt=recycle_prompt, device=device, dtype=dtype, update=update, eos=eos)
        super().__init__(vocab_size, self.largest, **settings)  # type: ignore[arg-type]
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.acceptance.reset()
        self.sizing.reset()
        self._order, self._steps = list(self._first_order), 0
        self._renew()

    def describe(self) -> dict[str, Any]:
        return self.sizing.describe()

    def session(self) -> AutoSession:
        return AutoSession(self)

    def choose(self) -> None:
        """Before a step: choose its tree."""
        tree = self._tree_of(self.sizing.choose(self._likelihoods), self.device)
        if self.tree is not tree:
            self.use_tree(tree)

    def account(self, verification: Verification) -> None:
        """After a step: learn from it."""
        self._steps += 1
        self.acceptance.update(verification.draft.tree, verification.node)
        if self._steps % RENEW_EVERY == 0:
            self._renew()

    def _renew(self) -> None:
        """Update the likelihood of each node, and rarely their order, by what was accepted so far."""
        p = self.acceptance.probabilities()
        if is_reorder(self._steps):
            # a child is never likelier than its parent
            self._order = sorted(range(len(p)), key=lambda i: (-p[i], i))[: len(self._order)]
        self._likelihoods = [1.0, *(p[i] for i in self._order)]

    def _tree_of(self, nodes: int, device: torch.device) -> Tree:
        """Return the tree of so many nodes in the current order; built when first used."""
        chosen = tuple(self._order[:nodes])
        if chosen not in self._trees:
            self._trees[chosen] = Tree.from_rank_paths(self.acceptance.rank_paths[i] for i in chosen).on(device)
        return self._trees[chosen]

    def state_dict(self) -> dict[str, torch.Tensor]:
        learnt = {"order": torch.tensor(self._order), "steps": torch.tensor([self._steps])}
        return super().state_dict() | self.acceptance.state_dict() | learnt | self.sizing.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load a saved state, or a matrix alone: then the order starts from the published tree's.

        Of a state with another number of nodes the order is not read.
        """
        super().load_state_dict({"candidates": state["candidates"]} if "candidates" in state else state)
        if "steps" not in state:
            return
        self.acceptance.load_state_dict(state)
        self._steps = int(state["steps"])
        if len(state["order"]) == len(self._order):
            self._order = state["order"].tolist()
        self._renew()
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
    paths = {*best_order(2 * MOST, k), *chains, *ends}
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def is_reorder(steps: int) -> bool:
    """True if the nodes are sorted anew at this step: 32, 128, 512, ..."""
    while steps > REORDER and steps % 4 == 0:
        steps //= 4
    return steps == REORDER
