"""The topology of a draft.

Node 0 is the root, the last known token, which is not yet in the cache. Nodes are in breadth-first
order. The tree of a root alone is plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from ...errors import UserError, one_line
from ...files import located

RankPath = tuple[int, ...]


class Tree:
    """Topology of a draft of n nodes, root included.

    Tensors are made when first used, as dynamic drafts have a new tree each step.

    Attributes:
        parents: int64 (n,), the node that each node continues; the root is its own parent.
        ranks: int64 (n,), which of its parent's candidates each node is, 0 = best.
        depths: int64 (n,).
        ancestors: bool (n, n); [i, j] is True if j is i or one of its ancestors.
        host_ancestors: the same in the host's memory.
        missing: bool (n, n); ~ancestors, root column True: nodes that need not match for a node to
            be accepted.
        paths: int64 (n, max_depth + 1); the nodes from the root to node i, then node i repeated.
        levels: (first, last + 1) node of each depth.
        rank_paths: per node, the ranks from the root down; () is the root.

    Raises:
        UserError: parents are not breadth-first.
    """

    def __init__(
        self,
        parents: Sequence[int],
        ranks: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        parents = list(parents)
        n = len(parents)
        forward = any(parent >= max(node, 1) for node, parent in enumerate(parents))
        if forward or not parents or parents[0] < 0 or parents != sorted(parents):
            raise UserError(
                "tree: parents must start with 0 (the root), point backwards and never decrease"
                f" (breadth-first order), got {parents[:8]}"
            )
        # siblings are neighbours: the next one of the same parent has the next rank
        if ranks is None:
            ranks = [0] * n
            for i in range(2, n):
                ranks[i] = ranks[i - 1] + 1 if parents[i] == parents[i - 1] else 0

        depths = [0] * n
        chains: list[list[int]] = [[0]]  # per node: the nodes from the root to it
        for i in range(1, n):
            p = parents[i]
            depths[i] = depths[p] + 1
            chains.append([*chains[p], i])
        self.max_depth = depths[-1]
        self.depth_of = depths
        self.chain_of = chains
        self.parent_of = parents
        self.rank_of = ranks
        starts = [depths.index(d) for d in range(self.max_depth + 1)] + [n]
        self.levels = list(zip(starts, starts[1:], strict=False))
        self.max_rank = max(ranks)
        # True where the accepted path is always a prefix of the nodes, so that a commit moves
        # nothing.
        self.is_chain = depths == list(range(n))

        self.device = torch.device(device)
        self._elsewhere: dict[torch.device, Tree] = {}

    @cached_property
    def ancestors(self) -> Tensor:
        return self.host_ancestors.to(self.device)

    @cached_property
    def host_ancestors(self) -> Tensor:
        visible = np.zeros((len(self), len(self)), dtype=bool)
        visible[0, 0] = True
        for node, parent in enumerate(self.parent_of[1:], 1):
            row = visible[node]
            row[:] = visible[parent]
            row[node] = True
        return torch.from_numpy(visible)

    @cached_property
    def missing(self) -> Tensor:
        missing = ~self.ancestors
        missing[:, 0] = True
        return missing

    @cached_property
    def paths(self) -> Tensor:
        return self._tensor(
            [chain + chain[-1:] * (self.max_depth + 1 - len(chain)) for chain in self.chain_of]
        )

    @cached_property
    def parents(self) -> Tensor:
        return self._tensor(self.parent_of)

    @cached_property
    def depths(self) -> Tensor:
        return self._tensor(self.depth_of)

    @cached_property
    def ranks(self) -> Tensor:
        return self._tensor(self.rank_of)

    @cached_property
    def rank_paths(self) -> list[RankPath]:
        return [self.rank_path(node) for node in range(len(self))]

    @property
    def first_path(self) -> list[int]:
        """Nodes from the root down, each the first child of the one before."""
        path = [0]
        for node in range(1, len(self)):
            if self.parent_of[node] == path[-1]:
                path.append(node)
        return path

    def rank_path(self, node: int) -> RankPath:
        return tuple([self.rank_of[i] for i in self.chain_of[node][1:]])

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        # NumPy reads a list several times as fast as torch
        return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(self.device)

    def __len__(self) -> int:
        return len(self.parent_of)

    def __repr__(self) -> str:
        by_depth = "/".join(str(b - a) for a, b in self.levels[1:]) or "root alone"
        return f"Tree({len(self) - 1} nodes: {by_depth})"

    @classmethod
    def from_rank_paths(cls, rank_paths: Iterable[Sequence[int]]) -> Tree:
        """Build the tree of these rank paths, in any order; the root is added.

        Raises:
            UserError: a path is empty, negative, given twice, or its parent is missing.
        """
        below_root = [tuple(p) for p in rank_paths]
        for path in below_root:
            if not path or not all(type(rank) is int and rank >= 0 for rank in path):
                raise UserError(
                    f"tree: {list(path)} is not a rank path (a list of one or more ranks, 0 = best)"
                )
        paths: list[RankPath] = [(), *sorted(below_root, key=lambda p: (len(p), p))]
        node = {path: i for i, path in enumerate(paths)}
        if len(node) != len(paths):
            twice = max(paths, key=paths.count)
            raise UserError(f"tree: node {list(twice)} is given twice")
        for path in paths[1:]:
            if path[:-1] not in node:
                raise UserError(f"tree: node {list(path)} has no parent; add {list(path[:-1])}")
        return cls([0] + [node[p[:-1]] for p in paths[1:]], [0] + [p[-1] for p in paths[1:]])

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(depth: int) -> Tree:
        """Return the chain of a root and `depth` nodes; depth 0 is the root alone."""
        return Tree([0] + list(range(depth)))

    def on(self, device: torch.device) -> Tree:
        if device == self.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = Tree(self.parent_of, self.rank_of, device)
        return self._elsewhere[device]


def arranged(
    tokens: Sequence[int], parents: Sequence[int], source: str | None = None
) -> tuple[Draft, list[int]]:
    """Return the draft of nodes listed each after its parent, and their breadth-first order.

    Args:
        parents: of each node; 0 is the root, its own parent.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    order = [0]
    ordered = [0]
    for index, node in enumerate(order):  # grows while it is walked
        order += children[node]
        ordered += [index] * len(children[node])
    return Draft(Tree(ordered), torch.tensor([tokens[node] for node in order]), source), order


@dataclass(slots=True)
class Draft:
    """A tree and its tokens, int64 (n,) on the tree's device, the target's or the CPU; root first.

    `source` names where the tokens come from, if a drafter has several sources.
    """

    tree: Tree
    tokens: Tensor
    source: str | None = None


def read_tree(path: str | Path) -> Tree:
    """Read a tree from YAML. Raises UserError naming the file if it is missing or malformed."""
    try:
        data = yaml.safe_load(located(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"tree: {path} cannot be read ({one_line(error)})") from None
    nodes = data.get("nodes") if isinstance(data, dict) else data
    if not isinstance(nodes, list) or not all(isinstance(node, list) for node in nodes):
        raise UserError(f"tree: {path} must hold a list of rank paths, such as [[0], [1], [0, 0]]")
    try:
        return Tree.from_rank_paths(nodes)
    except UserError as error:
        raise UserError(f"{error} (in {path})") from None
