"""A draft tree laid out for drawing: the root on the left, leaves below one another, acceptance as
colour.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import groupby
from typing import Any

from model.engine.tree import RankPath, layout

from ..statistics.acceptance import LEARNT, TREE_SOURCE, accepted_paths, by_node, fixed_tree
from ..statistics.pools import Pool

# %, upper bounds of the colour classes; the last class has none
BOUNDS = (
    0,
    1,
    2,
    5,
    10,
    20,
    40,
    70,
)
# units of the drawing; LEFT is room for the word root
COLUMN = 112
ROW = 13
MARGIN = 16
LEFT = 48
MOST_EQUAL = 3  # longest run of equal ranks that is spelled out


def draw(name: str, pool: Pool) -> dict[str, Any] | None:
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
    rows, leaves = layout([node.path for node in nodes])
    places = {
        path: (LEFT + COLUMN * len(path), round(MARGIN + ROW * (row + 0.5), 1))
        for path, row in rows.items()
    }
    deepest = max(len(node.path) for node in nodes)
    why = (
        "The tree changed during the run" if tree == LEARNT else "The records do not hold the tree"
    )
    return {
        "name": name,
        "dots": [
            (
                node,
                spelled(path),
                bisect_left(BOUNDS, 100 * node.share),
                *places[path],
                *places[path[:-1]],
            )
            for path, node in sorted((node.path, node) for node in nodes)
        ],
        "root": places[()],
        "size": (LEFT + COLUMN * deepest + MARGIN, ROW * leaves + 2 * MARGIN),
        "deepest": deepest,
        "never": sum(node.accepted == 0 for node in nodes),
        "unknown": "" if order else why,
    }


def spelled(path: RankPath) -> str:
    """Spell the ranks from the root down: 0·0·1; of a deep path 0×36 is the same rank 36 times.
    Empty for the root.
    """
    runs = [(str(rank), len(list(same))) for rank, same in groupby(path)]
    return "·".join(f"{rank}×{n}" if n > MOST_EQUAL else "·".join([rank] * n) for rank, n in runs)
