"""Acceptance by depth and by node of the draft tree, from step records only."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from model.engine import RankPath

from ..records.rows import Row
from .metrics import choices

# The source that drafts from the fixed tree, if a method has several sources.
TREE_SOURCE = "recycling"

# Drafting steps by nodes forwarded, the root included, and path accepted.
Accepted = Counter[tuple[int, RankPath]]


def accepted_paths(rows: Iterable[Row], source: str | None = None) -> Accepted:
    """Count the steps that drafted, if given only from one of a method's sources."""
    accepted: Accepted = Counter()
    every_source = itertools.repeat(itertools.repeat(None))

    for choice in choices(rows):
        turns = zip(
            choice.get("step_nodes") or [],
            choice.get("step_paths") or [],
            choice.get("step_sources") or every_source,
            strict=False,
        )
        for steps in turns:
            for forwarded, path, drafted_by in zip(*steps, strict=False):
                if forwarded > 1 and (source is None or drafted_by in (None, source)):
                    accepted[forwarded, tuple(path)] += 1

    return accepted


class Depth(NamedTuple):
    """Acceptance at one depth of the tree; columns.yaml defines the shares."""

    depth: int
    steps: int
    joint: float
    conditional: float


def by_depth(accepted: Accepted) -> list[Depth]:
    """Return acceptance from depth 1 down to the deepest that was ever accepted."""
    deepest = max((len(path) for _, path in accepted), default=0)
    reached = [0] * (deepest + 1)  # steps whose accepted path is at least that long

    for (_, path), steps in accepted.items():
        for depth in range(len(path) + 1):
            reached[depth] += steps

    depths = []
    for depth in range(1, deepest + 1):
        joint = reached[depth] / reached[0]
        conditional = reached[depth] / reached[depth - 1]
        depths.append(Depth(depth, reached[depth], joint, conditional))
    return depths


@dataclass(frozen=True)
class Node:
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


def by_node(accepted: Accepted, order: Sequence[RankPath]) -> list[Node]:
    """Return how often the nodes of a tree were accepted.

    `order` is breadth-first; a step with a smaller tree had the first nodes.
    """
    nodes = []
    for place, path in enumerate(order):
        # drafting steps whose tree had the node, by the path accepted
        tried = Counter[RankPath]()
        for (forwarded, other), steps in accepted.items():
            if place < forwarded - 1:
                tried[other] += steps
        counts = [_steps_through(tried, prefix) for prefix in ((), path, path[:-1])]
        nodes.append(Node(path, *counts))
    return nodes


def _steps_through(paths: Counter[RankPath], prefix: RankPath) -> int:
    return sum(steps for path, steps in paths.items() if path[: len(prefix)] == prefix)


def most_accepted(nodes: Iterable[Node], most: int) -> list[Node]:
    """Return the nodes most often on an accepted path, best first; parents come before children."""
    best_first = sorted(nodes, key=lambda node: (-node.accepted, len(node.path), node.path))
    return best_first[:most]
