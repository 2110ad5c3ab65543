"""How deep the draft tree is accepted, and at which of its nodes: from step records alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..records.rows import Row

RankPath = tuple[int, ...]
TEMPLATE = "recycling"  # the source whose steps draft from the template, where a method has others, too


def accepted_paths(rows: Iterable[Row], source: str | None = None) -> Iterator[RankPath]:
    """The accepted rank path of every step that drafted; () where only the root stood.

    Args:
        source: of a method with several sources, only the steps that drafted from this one.
    """
    for row in rows:
        for choice in row["choices"]:
            turns = zip(choice.get("step_nodes") or [], choice.get("step_paths") or [], strict=False)
            for turn, (nodes, paths) in enumerate(turns):
                sources = (choice.get("step_sources") or {turn: [None] * len(nodes)})[turn]
                for count, path, drafted_by in zip(nodes, paths, sources, strict=True):
                    if count > 1 and (source is None or drafted_by in (None, source)):
                        yield tuple(path)


@dataclass(frozen=True)
class Depth:
    """Acceptance at one depth of the tree, over all steps that drafted.

    Attributes:
        steps: steps whose accepted path reaches this depth.
        joint: their share of all steps.
        conditional: their share of the steps that reach the depth above.
    """

    depth: int
    steps: int
    joint: float
    conditional: float


def by_depth(rows: Iterable[Row]) -> list[Depth]:
    """Acceptance from depth 1 down to the deepest that ever stood; nothing without step records."""
    lengths = Counter(len(path) for path in accepted_paths(rows))
    total = above = sum(lengths.values())
    found = []
    for depth in range(1, max(lengths, default=0) + 1):
        reached = sum(count for length, count in lengths.items() if length >= depth)
        found.append(Depth(depth, reached, reached / total, reached / above if above else math.nan))
        above = reached
    return found


@dataclass(frozen=True)
class Node:
    """One node of the tree: how often it was tried behind its standing parent, how often it stood."""

    tried: int
    stood: int

    @property
    def share(self) -> float:
        """Of the steps in which its parent stood, those in which it stood, too; NaN if it was never tried."""
        return self.stood / self.tried if self.tried else math.nan


def by_rank_path(rows: Iterable[Row], tree: Sequence[Sequence[int]]) -> dict[RankPath, Node]:
    """For each node of a fixed template: visits of its parent and of itself, in the steps that drafted from it."""
    stood: Counter[RankPath] = Counter()
    for path in accepted_paths(rows, TEMPLATE):
        for depth in range(len(path) + 1):
            stood[path[:depth]] += 1
    nodes = [tuple(path) for path in tree]
    return {node: Node(stood[node[:-1]], stood[node]) for node in nodes}


def depth_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of tables/acceptance_by_depth.csv."""
    return [
        {"depth": d.depth, "steps": d.steps, "joint_acceptance": d.joint, "conditional_acceptance": d.conditional}
        for d in by_depth(rows)
    ]
