"""Acceptance by depth and by node of the draft tree, from step records only."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from model.engine.tree import RankPath

from ..records.rows import Row
from ..records.runs import Run

LEARNT = "auto"  # a tree whose nodes' order is learnt: records do not say which nodes a step tried
TREE_SOURCE = (  # the source that drafts from the fixed tree, if a method has several sources
    "recycling"
)


# drafting steps by nodes forwarded, the root included, and path accepted
Accepted = Counter[tuple[int, RankPath]]


def accepted_paths(rows: Iterable[Row], source: str | None = None) -> Accepted:
    """Count the steps that drafted, only from `source` if a method has several; none without step
    records.
    """
    accepted: Accepted = Counter()
    for choice in (choice for row in rows for choice in row["choices"]):
        turns = zip(choice.get("step_nodes") or [], choice.get("step_paths") or [], strict=False)
        for turn, (nodes, paths) in enumerate(turns):
            sources = (
                choice["step_sources"][turn]
                if choice.get("step_sources")
                else itertools.repeat(None)
            )
            for forwarded, path, drafted_by in zip(nodes, paths, sources, strict=False):
                if forwarded > 1 and (source is None or drafted_by in (None, source)):
                    accepted[forwarded, tuple(path)] += 1
    return accepted


class Depth(NamedTuple):
    """Acceptance at one depth of the tree, over all steps that drafted; columns.yaml defines the
    shares.
    """

    depth: int
    steps: int
    joint: float
    conditional: float


def by_depth(accepted: Accepted) -> list[Depth]:
    """Return acceptance from depth 1 down to the deepest that was ever accepted; nothing without
    step records.
    """
    deepest = max((len(path) for _, path in accepted), default=0)
    reached = [
        sum(n for (_, path), n in accepted.items() if len(path) >= depth)
        for depth in range(deepest + 1)
    ]
    return [
        Depth(d, reached[d], reached[d] / reached[0], reached[d] / reached[d - 1])
        for d in range(1, deepest + 1)
    ]


@dataclass(frozen=True)
class Node:
    """A node of the tree and how often it was accepted. Without tries, shares are 0."""

    path: RankPath
    tried: int  # drafting steps whose tree had this node
    accepted: int  # those in which it was on the accepted path
    parent_accepted: int  # those in which its parent was; the tries of the conditional share

    @property
    def share(self) -> float:
        return self.accepted / self.tried if self.tried else 0.0

    @property
    def given_parent(self) -> float:
        return self.accepted / self.parent_accepted if self.parent_accepted else 0.0


def fixed_tree(run: Run) -> list[RankPath] | None:
    """Return the fixed tree's nodes below the root, breadth-first; None without one, or where it
    changes (auto).
    """
    if run.settings["method"].get("tree") == LEARNT or run.identity.draft_tree is None:
        return None
    return [tuple(path) for path in run.identity.draft_tree]


def by_node(accepted: Accepted, order: Sequence[RankPath] | None) -> list[Node]:
    """Return the nodes of a tree, each after its parent, and how often they were accepted.

    Args:
        order: as `fixed_tree` returns it; a step with a smaller tree had the first nodes. None:
            only nodes that were ever accepted are returned, and every step counts as a try of each.
    """
    fixed = order is not None
    if order is None:
        prefixes = {path[:depth] for _, path in accepted for depth in range(1, len(path) + 1)}
        order = sorted(prefixes, key=lambda path: (len(path), path))
    nodes = []
    for place, path in enumerate(order):
        tries = [
            (other, n) for (size, other), n in accepted.items() if place < size - 1 or not fixed
        ]
        of_parent = [(other, n) for other, n in tries if other[: len(path) - 1] == path[:-1]]
        times = sum(n for other, n in of_parent if other[: len(path)] == path)
        nodes.append(Node(path, sum(n for _, n in tries), times, sum(n for _, n in of_parent)))
    return nodes


def most_accepted(nodes: Iterable[Node], most: int) -> list[Node]:
    """Return the nodes most often on an accepted path, best first; ties go to the shallower, then
    the better rank.

    A node is accepted at most as often as its parent, so each comes after its parent.
    """
    return sorted(nodes, key=lambda node: (-node.accepted, len(node.path), node.path))[:most]
