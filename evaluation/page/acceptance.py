"""Acceptance of each node of a draft tree, from the step records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from model.decoding.tree import RankPath

from ..records.rows import Row
from ..records.runs import Run
from ..statistics.acceptance import TEMPLATE
from .circumstances import Configuration

AUTO = "auto"  # its order is learnt, so which nodes a step tried is not known afterwards


@dataclass(frozen=True)
class Step:
    """One step of a turn: nodes forwarded, rank path accepted, and where its tokens stand in the turn's output."""

    turn: int
    number: int
    nodes: int
    path: RankPath
    start: int
    accepted: int


@dataclass(frozen=True)
class Node:
    """A node of the tree and how often it stood.

    Attributes:
        tried: drafting steps whose tree had this node.
        stood: those in which it was on the accepted path.
        parent_stood: those in which its parent was; the tries of the conditional share.
    """

    path: RankPath
    tried: int
    stood: int
    parent_stood: int

    @property
    def share(self) -> float:
        return self.stood / self.tried if self.tried else 0.0

    @property
    def given_parent(self) -> float:
        return self.stood / self.parent_stood if self.parent_stood else 0.0


def has_tree(configuration: Configuration) -> bool:
    """Does it draft from a template, and do its records hold the accepted rank paths?"""
    if not configuration.first.settings["method"].get("tree"):
        return False
    return any(choice.get("step_paths") for row in configuration.rows for choice in row["choices"])


def steps_of(choice: dict[str, Any]) -> Iterator[Step]:
    """All steps of one answer in order; nothing where the records lack what it takes.

    A step puts out the drafts that stand and the target's own next token; its root is the token before them.
    """
    lengths = iter(choice.get("accept_lengths") or [])
    nodes, paths = choice.get("step_nodes") or [], choice.get("step_paths") or []
    for turn, (turn_nodes, turn_paths) in enumerate(zip(nodes, paths, strict=False)):
        start = 0
        for number, (n, path) in enumerate(zip(turn_nodes, turn_paths, strict=False)):
            accepted = next(lengths, 0)
            yield Step(turn, number, n, tuple(path), start, accepted)
            start += accepted


@dataclass
class Paths:
    """The accepted rank paths of all steps that drafted, from the template where there are other sources.

    Attributes:
        counts: steps by (nodes forwarded, path).
        longest: (row, choice, turn, step) of the first of the longest paths.
    """

    counts: Counter[tuple[int, RankPath]] = field(default_factory=Counter)
    longest: tuple[Row, int, int, int] | None = None

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Paths:
        """Count them. Rows may be many, so nothing else is made of a step."""
        found, most = cls(), 0
        for row in rows:
            for index, choice in enumerate(row["choices"]):
                turns = zip(choice.get("step_nodes") or [], choice.get("step_paths") or [], strict=False)
                for turn, (nodes, paths) in enumerate(turns):
                    sources = (choice.get("step_sources") or {turn: [None] * len(nodes)})[turn]
                    for number, (n, path, source) in enumerate(zip(nodes, paths, sources, strict=False)):
                        if n > 1 and source in (None, TEMPLATE):
                            found.counts[n, tuple(path)] += 1
                            if len(path) > most:
                                most, found.longest = len(path), (row, index, turn, number)
        return found


def node_order(run: Run) -> list[RankPath] | None:
    """The template's nodes below the root, breadth-first; None where there is none, or where it changes (auto)."""
    if run.settings["method"].get("tree") == AUTO or run.draft_tree is None:
        return None
    return [tuple(path) for path in run.draft_tree]


def acceptance(paths: Paths, order: list[RankPath] | None) -> list[Node]:
    """The nodes of a tree, each behind its parent, and how often they stood.

    Args:
        order: the template's nodes, as `node_order` gives them. None: only nodes that once stood are known, and every
            step counts as a try of each.
    """
    counted = paths.counts
    rebuilt = order is not None
    if order is None:
        seen = {path[:d] for _, path in counted for d in range(1, len(path) + 1)}
        order = sorted(seen, key=lambda p: (len(p), p))
    nodes = []
    for place, path in enumerate(order):
        having = [(p, n) for (size, p), n in counted.items() if place < size - 1 or not rebuilt]
        above = sum(n for p, n in having if p[: len(path) - 1] == path[:-1])
        nodes.append(Node(path, sum(n for _, n in having), sum(n for p, n in having if p[: len(path)] == path), above))
    return nodes


def by_depth(paths: Paths) -> list[float]:
    """Share of drafting steps that accepted at least so many drafts, from 1 to the most that any accepted."""
    lengths: Counter[int] = Counter()
    for (_, path), n in paths.counts.items():
        lengths[len(path)] += n
    total = sum(lengths.values())
    return [sum(n for d, n in lengths.items() if d >= depth) / total for depth in range(1, max(lengths, default=0) + 1)]
