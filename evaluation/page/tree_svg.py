"""A draft tree laid out for drawing.

The root is on the left and acceptance is the colour. A node's first child is on its row, each other
one begins a new row.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import groupby
from typing import Any

from model.engine.tree import RankPath

from ..statistics.acceptance import LEARNT, TREE_SOURCE, accepted_paths, by_node, fixed_tree
from ..statistics.pools import Pool

# %, upper bounds of the colour classes; the last class has none
BOUNDS = (0, 1, 2, 5, 10, 20, 40, 70)

# units of the drawing; LEFT is room for the word root
COLUMN = 112
ROW = 13
MARGIN = 16
LEFT = 48
MOST_EQUAL = 3  # longest run of equal ranks that is spelled out
UNRECORDED = "The records do not hold the tree"


def draw(pool: Pool) -> dict[str, Any] | None:
    """Place the nodes of a configuration's draft tree, over all repeats, for the page.

    Returns:
        `dots` as (node, its ranks, colour class, x, y, x and y of its parent) and figures of the
        whole tree; None without a tree, or if no step drafted from it.
    """
    accepted = accepted_paths(pool.rows, TREE_SOURCE)
    order = fixed_tree(pool.first)
    tree = pool.first.settings["method"].get("tree")
    nodes = by_node(accepted, order)
    if not tree or not accepted or not nodes:
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
        dots.append((node, spelled(node.path), shade, *places[node.path], *places[parent]))

    unknown = ""
    if not order:
        learnt = tree == LEARNT
        unknown = "The tree changed during the run" if learnt else UNRECORDED
    deepest = max(len(node.path) for node in nodes)
    return {
        "name": pool.title,
        "dots": dots,
        "root": places[()],
        "size": (LEFT + COLUMN * deepest + MARGIN, y + ROW / 2 + MARGIN),
        "deepest": deepest,
        "never": sum(node.accepted == 0 for node in nodes),
        "unknown": unknown,
    }


def spelled(path: RankPath) -> str:
    """Spell the ranks from the root down: 0·0·1. Empty for the root.

    Of a deep path, 0×36 is the same rank 36 times.
    """
    words = []
    for rank, same in groupby(path):
        times = len(list(same))
        if times > MOST_EQUAL:
            words.append(f"{rank}×{times}")
        else:
            words += [str(rank)] * times
    return "·".join(words)
