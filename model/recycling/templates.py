"""Draft tree templates (paper, 3.2).

| name | parameters | tree |
|---|---|---|
| 2.2.2 | | the published one, 80 nodes |
| best | nodes | the published order; beyond 80 by the same power law |
| chain | depth | one candidate below another |
| balanced | branching, depth, nodes | at most `nodes`, level by level |
| shape | branching, depth, nodes | `depth` deep, `branching` wide, then the most likely nodes |
| file | path | a YAML list of rank paths, or a mapping with such a list under `nodes` |
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from ..engine import RankPath, Tree
from ..engine.rule.tree import read_tree
from ..errors import UserError

_SHIPPED = Path(__file__).parent / "trees"
_MAX_NODES = 4096
PARAMETERS = {  # by template; the shipped ones have none
    "best": ("nodes",),
    "chain": ("depth",),
    "balanced": ("branching", "depth", "nodes"),
    "shape": ("branching", "depth", "nodes"),
    "file": ("path",),
}


def build_template(
    name: str,
    *,
    k: int = 8,
    nodes: int | None = None,
    depth: int | None = None,
    branching: int | None = None,
    path: str | None = None,
) -> Tree:
    """Build a template by name, see the table above; `nodes` do not count the root."""
    parameters = {"nodes": nodes, "depth": depth, "branching": branching, "path": path}
    shipped = sorted(p.stem for p in _SHIPPED.glob("*.yaml"))
    if name not in PARAMETERS and name not in shipped:
        raise UserError(
            f"tree: no template {name!r}; there are {', '.join(shipped + list(PARAMETERS))}"
        )

    for key, value in parameters.items():
        if (value is not None) != (key in PARAMETERS.get(name, ())):
            problem = (
                f"needs {key} (tree.{key}=...)" if value is None else f"has no parameter {key}"
            )
            raise UserError(f"tree: template {name!r} {problem}")
        if isinstance(value, int) and not 0 <= value <= _MAX_NODES:
            raise UserError(f"tree: {key}={value} must be from 0 to {_MAX_NODES}")

    nodes = nodes or 0
    depth = depth or 0
    branching = branching or 0

    if name == "file":
        tree = read_tree(str(path))
    elif name == "best":
        tree = Tree.from_rank_paths(best_order(nodes, k))
    elif name == "chain":
        tree = Tree.chain(depth)
    elif name == "balanced":  # equal shares: level by level
        tree = Tree.from_rank_paths(filled([], nodes, [0.5] * branching, depth))
    elif name == "shape":
        order: list[RankPath] = []
        if depth and branching:
            order += [(0,) * level for level in range(1, 1 + depth)]
            order += [(rank,) for rank in range(1, branching)]
        tree = Tree.from_rank_paths(filled(order, nodes, likelihoods(branching), depth))
    else:
        tree = read_tree(_SHIPPED / f"{name}.yaml")
    if tree.max_rank >= k:
        raise UserError(
            f"tree: template {name!r} needs candidates up to rank {tree.max_rank}, but k={k}"
        )
    return tree


def best_first(
    children: Callable[[RankPath], Iterable[float]],
) -> Iterator[tuple[float, RankPath]]:
    """Yield likelihood and rank path of nodes below a root, the most likely first."""
    frontier: list[tuple[float, RankPath]] = []  # -likelihood, rank path
    negated = -1.0
    path: RankPath = ()
    while True:
        for rank, share in enumerate(children(path)):
            heapq.heappush(frontier, (negated * share, (*path, rank)))
        if not frontier:
            return
        negated, path = heapq.heappop(frontier)
        yield -negated, path


def filled(
    order: list[RankPath], n: int, shares: list[float], depth: int = _MAX_NODES
) -> list[RankPath]:
    """Extend `order` to at most n nodes by the most likely others of these shares by rank."""
    listed = set(order)
    others = best_first(lambda path: shares if len(path) < depth else [])
    further = (path for _, path in others if path not in listed)
    return [*order, *itertools.islice(further, max(n - len(order), 0))][:n]


def likelihoods(ranks: int) -> list[float]:
    """Return acceptance probabilities by rank, up to scale.

    This power law's own best 80 nodes come nearest to the published tree (70 in common).
    """
    return [0.45 / (rank + 1) ** 1.9 for rank in range(ranks)]


@lru_cache(maxsize=64)
def best_order(n: int, k: int) -> tuple[RankPath, ...]:
    shares = likelihoods(k)
    published = [p for p in read_tree(_SHIPPED / "2.2.2.yaml").rank_paths[1:] if max(p) < k]
    published.sort(key=lambda path: (-math.prod(shares[rank] for rank in path), path))
    return tuple(filled(published, n, shares))
