"""A draft tree laid out for drawing.

A node's first child is on its row; each other one begins a new row.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from model.engine.rule.tree import RankPath

from ..statistics.acceptance import TREE_SOURCE, accepted_paths, by_node
from ..statistics.pools import Pool

# %, upper bounds of the colour classes; the last class has none
BOUNDS = (0, 1, 2, 5, 10, 20, 40, 70)

# units of the drawing; LEFT is room for the word root
COLUMN = 112
ROW = 13
MARGIN = 16
LEFT = 48


def draw(pool: Pool) -> dict[str, Any] | None:
    """Place the nodes of a configuration's draft tree, over all repeats.

    Returns:
        `dots` as (node, its ranks, colour class, x, y, x and y of its parent) and figures of the
        whole tree; None without a fixed tree, or if no step drafted from it.
    """
    accepted = accepted_paths(pool.rows, TREE_SOURCE)
    nodes = by_node(accepted, pool.first.draft_tree)
    if not accepted or not nodes:
        return None

    y = MARGIN + ROW / 2
    places: dict[RankPath, tuple[float, float]] = {(): (LEFT, y)}
    parents = set[RankPath]()
    dots = []
    for node in sorted(nodes, key=lambda node: node.path):  # depth-first
        parent = node.path[:-1]
        y += ROW * (parent in parents)
        parents.add(parent)
        places[node.path] = (LEFT + COLUMN * len(node.path), y)
        shade = bisect_left(BOUNDS, 100 * node.share)
        ranks = "·".join(map(str, node.path))
        dots.append((node, ranks, shade, *places[node.path], *places[parent]))

    deepest = max(len(node.path) for node in nodes)
    return {
        "name": pool.title,
        "dots": dots,
        "root": places[()],
        "size": (LEFT + COLUMN * deepest + MARGIN, y + ROW / 2 + MARGIN),
        "deepest": deepest,
        "never": sum(node.accepted == 0 for node in nodes),
    }
