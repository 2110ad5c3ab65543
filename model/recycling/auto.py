"""Token Recycling with a tree of the best n nodes: their order and n are learnt while decoding."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..engine import Tree, Verification
from ..engine.sizing import MOST, Sizing
from ..engine.tree import RankPath
from .acceptance import Acceptance
from .templates import best_order
from .token_recycling import RecyclingSession, TokenRecycling

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
        self.acceptance = Acceptance(considered_paths(k), best_order(most, k))
        self._trees: dict[tuple[int, ...], Tree] = {}
        self.largest = self.tree_of(most, device)
        settings = dict(k=k, recycle_prompt=recycle_prompt, device=device, dtype=dtype, update=update, eos=eos)
        super().__init__(vocab_size, self.largest, **settings)  # type: ignore[arg-type]
        self.stores = [self.matrix, self.acceptance, self.sizing]

    def session(self) -> AutoSession:
        return AutoSession(self)

    def tree_of(self, nodes: int, device: torch.device) -> Tree:
        """Return the tree of so many nodes in the current order; built when first used."""
        chosen = tuple(self.acceptance.order[:nodes])
        if chosen not in self._trees:
            self._trees[chosen] = Tree.from_rank_paths(self.acceptance.rank_paths[i] for i in chosen).on(device)
        return self._trees[chosen]


class AutoSession(RecyclingSession):
    """A sequence without state of its own: all that is learnt is the method's."""

    method: AutoRecycling

    def choose(self) -> None:
        method = self.method
        tree = method.tree_of(method.sizing.choose(method.acceptance.likelihoods), method.device)
        if method.tree is not tree:
            method.use_tree(tree)

    def account(self, verification: Verification) -> None:
        self.method.acceptance.update(verification.draft.tree, verification.node)


def considered_paths(k: int) -> tuple[RankPath, ...]:
    """List the rank paths among which nodes are chosen: the most likely by the power law, and chains of rank 0."""
    chains = [(0,) * depth for depth in range(1, LONGEST_CHAIN + 1)]
    ends = [(*path, rank) for path in chains for rank in range(min(2, k))]
    paths = {*best_order(2 * MOST, k), *chains, *ends}
    return tuple(sorted(paths, key=lambda path: (len(path), path)))
