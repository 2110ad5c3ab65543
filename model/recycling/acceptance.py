"""Acceptance probability of each node of a draft tree, and the order of the nodes.

Both are learnt while decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine import Tree
from ..engine.sizing import MAX_AUTO
from ..engine.tree import RankPath
from ..errors import UserError
from .templates import best_order, likelihood

MEMORY_VISITS = 256.0  # visits of a node over which its share is averaged
PATH_PRIOR = 8.0  # visits that the share of a path's rank is worth in the path's own share
RANK_PRIOR = 16.0  # visits that the power law is worth in a rank's share
REORDERS = frozenset(32 * 4**i for i in range(12))  # the nodes are sorted anew at these steps
LONGEST_CHAIN = 12  # chains of first candidates are considered down to this depth
# paths of the power law among which nodes are chosen, and so the most that `auto:N` may have
CONSIDERED = 2 * MAX_AUTO
RENEW_EVERY = 4  # steps between two updates of the likelihoods


class Acceptance:
    """P(path), the probability that the node at a rank path is accepted, for a fixed set of paths.

    P(path) = P(parent) * c(path), where c is the share of path's visits in which it was accepted; a
    visit is a step in which the path was drafted and its parent accepted. Conditioned so, c can be
    learnt from trees of any shape. A path seen rarely borrows from all paths that end in the same
    rank, and those from the power law of `templates.likelihood`.

    Args:
        paths: parents before children.
        first: the paths that are drafted, most likely first, until an order is learnt.

    Attributes:
        order: indices of the paths to draft, most likely first, each after its parent.
        likelihoods: of the root and of each path in that order.
    """

    def __init__(self, paths: Sequence[RankPath], first: Sequence[RankPath] = ()) -> None:
        self.rank_paths = tuple(paths)
        self._index = {path: i for i, path in enumerate(self.rank_paths)}
        self._parent = [self._index.get(path[:-1], -1) for path in self.rank_paths]
        self._rank = [path[-1] for path in self.rank_paths]
        self._priors = [likelihood((rank,)) for rank in range(max(self._rank, default=0) + 1)]
        self._first_order = [self._index[path] for path in first]
        # by id of a tree: the tree, and per node its children's numbers and paths
        self._children: dict[int, tuple[Tree, list[list[tuple[int, int]]]]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all visits: back to the power law and the first order."""
        self._visits = [0.0] * len(self.rank_paths)
        self._accepted = [0.0] * len(self.rank_paths)
        self._rank_visits = [RANK_PRIOR] * len(self._priors)
        self._rank_accepted = [RANK_PRIOR * prior for prior in self._priors]
        self.order = self._first_order
        self._steps = 0
        self._renew()

    def update(self, tree: Tree, node: int) -> None:
        """Count a step: `node` of `tree` was the deepest that was accepted.

        A step without a draft teaches the matrix, so what was seen before it counts less from then
        on.
        """
        keep = 1 - 1 / MEMORY_VISITS

        if len(tree) == 1:
            self._visits = [keep * count for count in self._visits]
            self._accepted = [keep * count for count in self._accepted]
            for rank, prior in enumerate(self._priors):
                visits = self._rank_visits[rank]
                accepted = self._rank_accepted[rank]
                self._rank_visits[rank] += (RANK_PRIOR - visits) / MEMORY_VISITS
                self._rank_accepted[rank] += (RANK_PRIOR * prior - accepted) / MEMORY_VISITS

        children = self._children_of(tree)
        chain = tree.chain_of[node]
        for parent, accepted_child in zip(chain, [*chain[1:], -1], strict=True):
            for child, path in children[parent]:
                hit = float(child == accepted_child)
                rank = self._rank[path]
                self._visits[path] = self._visits[path] * keep + 1
                self._accepted[path] = self._accepted[path] * keep + hit
                self._rank_visits[rank] = self._rank_visits[rank] * keep + 1
                self._rank_accepted[rank] = self._rank_accepted[rank] * keep + hit

        self._steps += 1
        if self._steps % RENEW_EVERY == 0:
            self._renew()

    def _renew(self) -> None:
        """Update the likelihood of each node by what was accepted so far.

        Rarely, update their order, too.
        """
        p = self.probabilities()
        if self._steps in REORDERS:
            # a child is never likelier than its parent
            self.order = sorted(range(len(p)), key=lambda i: (-p[i], i))[: len(self.order)]
        self.likelihoods = [1.0, *(p[i] for i in self.order)]

    def probabilities(self) -> list[float]:
        by_rank = [
            accepted / visits
            for accepted, visits in zip(self._rank_accepted, self._rank_visits, strict=True)
        ]
        p = list[float]()
        for accepted, visits, rank, parent in zip(
            self._accepted, self._visits, self._rank, self._parent, strict=True
        ):
            share = (accepted + PATH_PRIOR * by_rank[rank]) / (visits + PATH_PRIOR)
            p.append(share * (p[parent] if parent >= 0 else 1.0))

        return p

    def _children_of(self, tree: Tree) -> list[list[tuple[int, int]]]:
        """Return the children of each node as (node, index of its path).

        They are listed once for each tree.
        """
        if id(tree) not in self._children:
            listed: list[list[tuple[int, int]]] = [[] for _ in range(len(tree))]
            for node, path in enumerate(tree.rank_paths):
                if node and path in self._index:
                    listed[tree.chain_of[node][-2]].append((node, self._index[path]))
            # keeps the tree alive, so that its id is not reused
            self._children[id(tree)] = (tree, listed)
        return self._children[id(tree)][1]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything learnt: counts, float64; the order and the steps, int64."""
        return {
            # visits and accepted: (2, paths) and (2, ranks)
            "path_counts": torch.tensor([self._visits, self._accepted], dtype=torch.float64),
            "rank_counts": torch.tensor(
                [self._rank_visits, self._rank_accepted], dtype=torch.float64
            ),
            "order": torch.tensor(self.order, dtype=torch.int64),
            "steps": torch.tensor([self._steps]),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load saved counts, if the state has any.

        The order is loaded only if it has the same number of nodes.

        Raises UserError if the state holds counts of other paths, a part of them, or impossible
        ones.
        """
        shapes = {
            "path_counts": (2, len(self.rank_paths)),
            "rank_counts": (2, len(self._priors)),
            "steps": (1,),
        }

        if not state.keys() & {*shapes, "order"}:
            self.reset()
            return

        nothing = torch.zeros(0)
        fits = all(state.get(name, nothing).shape == shape for name, shape in shapes.items())
        if not (fits and self._is_possible(state)):
            raise UserError(
                "start: the saved acceptance was learnt with another k, or is damaged; use another"
                " start"
            )

        self.reset()
        self._visits, self._accepted = state["path_counts"].tolist()
        self._rank_visits, self._rank_accepted = state["rank_counts"].tolist()
        self._steps = int(state["steps"])
        if len(state["order"]) == len(self.order):
            self.order = state["order"].tolist()

        self._renew()

    def _is_possible(self, state: dict[str, torch.Tensor]) -> bool:
        """True if no more is accepted than visited, and each path comes once, after its parent."""
        for name in ("path_counts", "rank_counts"):
            visits, accepted = state[name]
            if not ((accepted >= 0) & (accepted <= visits) & visits.isfinite()).all():
                return False

        drafted = {-1}  # the root
        for path in state.get("order", torch.zeros(0)).tolist():
            if path in drafted or path not in range(len(self._parent)):
                return False
            if self._parent[path] not in drafted:
                return False
            drafted.add(path)

        return True


def considered_paths(k: int) -> tuple[RankPath, ...]:
    """List the rank paths among which nodes are chosen.

    They are the most likely by the power law, and chains of rank 0.
    """
    chains = [(0,) * depth for depth in range(1, LONGEST_CHAIN + 1)]
    paths = {*best_order(CONSIDERED, k), *chains}
    for rank in range(min(2, k)):
        paths.update((*path, rank) for path in chains)
    return tuple(sorted(paths, key=lambda path: (len(path), path)))
