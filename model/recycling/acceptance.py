"""Acceptance probability of each node of a draft tree, and the order of the nodes.

Both are learnt while decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine import Tree
from ..engine.saved import MAX_COUNT, State, checked
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
        self.reset()

    def reset(self) -> None:
        """Forget all visits: back to the power law and the first order."""
        # visits, and those of them in which the node was accepted; both fade
        self._path_counts = [[0.0, 0.0] for _ in self.rank_paths]
        self._rank_counts = [[RANK_PRIOR, RANK_PRIOR * prior] for prior in self._priors]
        self.order = self._first_order
        self._steps = 0
        self._renew()

    def update(self, tree: Tree, node: int) -> None:
        """Count a step: `node` of `tree` was the deepest that was accepted.

        A step without a draft teaches the matrix, so what was seen before it counts less from then
        on.
        """
        if len(tree) == 1:
            for counts in self._path_counts:
                _move(counts, 0.0, 0.0)
            for counts, prior in zip(self._rank_counts, self._priors, strict=True):
                _move(counts, RANK_PRIOR, RANK_PRIOR * prior)

        accepted = tree.chain_of[node]
        for child, parent in enumerate(tree.parent_of):
            if parent > node:  # as those of all later nodes
                break
            path = self._index.get(tree.rank_paths[child])
            if path is not None and parent in accepted:
                hits = MEMORY_VISITS * (child in accepted)
                _move(self._path_counts[path], MEMORY_VISITS, hits)
                _move(self._rank_counts[self._rank[path]], MEMORY_VISITS, hits)

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
        by_rank = [accepted / visits for visits, accepted in self._rank_counts]
        p = list[float]()
        for counts, rank, parent in zip(self._path_counts, self._rank, self._parent, strict=True):
            visits, accepted = counts
            share = (accepted + PATH_PRIOR * by_rank[rank]) / (visits + PATH_PRIOR)
            p.append(share * (p[parent] if parent >= 0 else 1.0))

        return p

    def state_dict(self) -> State:
        """Counts, float64 (paths, 2) and (ranks, 2); the order and the steps, int64."""
        return {
            "path_counts": torch.tensor(self._path_counts, dtype=torch.float64),
            "rank_counts": torch.tensor(self._rank_counts, dtype=torch.float64),
            "order": torch.tensor(self.order, dtype=torch.int64),
            "steps": torch.tensor([self._steps]),
        }

    def read(self, state: State) -> State | None:
        """Return saved counts, order and steps; None if the state has none.

        Raises UserError if they are of other paths, or a path comes before its parent.
        """
        if "path_counts" not in state:
            return None
        paths = len(self.rank_paths)
        ranks = len(self._priors)
        counts = {
            "path_counts": checked(state, "path_counts", (paths, 2), 0, MEMORY_VISITS, real=True),
            "rank_counts": checked(state, "rank_counts", (ranks, 2), 0, MEMORY_VISITS, real=True),
        }
        order = checked(state, "order", (-1,), 0, paths - 1)
        fits = bool((counts["rank_counts"][:, 0] >= 1).all())
        drafted = {-1}
        for path in order.tolist():
            fits = fits and self._parent[path] in drafted and path not in drafted
            drafted.add(path)
        if not fits:
            raise UserError("start: the saved order or rank_counts are damaged")
        return counts | {"order": order, "steps": checked(state, "steps", (1,), 0, MAX_COUNT)}

    def load(self, saved: State) -> None:
        """Load what `read` returned; the order only if it has the same number of nodes."""
        self._path_counts = saved["path_counts"].tolist()
        self._rank_counts = saved["rank_counts"].tolist()
        if len(saved["order"]) == len(self.order):
            self.order = saved["order"].tolist()
        self._steps = int(saved["steps"])
        self._renew()


def _move(counts: list[float], visits: float, accepted: float) -> None:
    """Move both counts towards these by 1 / MEMORY_VISITS."""
    counts[0] += (visits - counts[0]) / MEMORY_VISITS
    counts[1] += (accepted - counts[1]) / MEMORY_VISITS


def considered_paths(k: int) -> tuple[RankPath, ...]:
    """List the rank paths among which nodes are chosen.

    They are the most likely by the power law, and chains of rank 0.
    """
    chains = [(0,) * depth for depth in range(1, LONGEST_CHAIN + 1)]
    paths = {*best_order(CONSIDERED, k), *chains}
    for rank in range(min(2, k)):
        paths.update((*path, rank) for path in chains)
    return tuple(sorted(paths, key=lambda path: (len(path), path)))
