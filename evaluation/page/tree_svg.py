"""A draft tree laid out for drawing: the root on the left, leaves below one another, acceptance as colour."""

from __future__ import annotations

from dataclasses import dataclass

from model.engine.tree import RankPath, layout

from ..statistics.acceptance import LEARNT, TEMPLATE, Node, accepted_paths, by_node, template
from ..statistics.pools import Pool
from .tokens import spelled

BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)  # upper ends of colour classes 1, 2, ...; 0: never accepted
COLUMN, ROW, MARGIN, LEFT = 112, 13, 16, 48  # units of the drawing; LEFT is room for the word root


@dataclass(frozen=True)
class Dot:
    """A node as drawn; `shade` is its colour class."""

    x: float
    y: float
    from_x: float
    from_y: float
    shade: int
    title: str


@dataclass(frozen=True)
class Drawing:
    """A tree ready for the template; `words` are the sentences that go with it."""

    name: str
    width: float
    height: float
    root: tuple[float, float]
    dots: list[Dot]
    words: list[str]


def legend() -> list[tuple[int, str]]:
    """Return the colour classes and what they mean."""
    edges = [f"{100 * b:g}" for b in BOUNDS]
    middle = [(i + 1, f"{a}–{b} %") for i, (a, b) in enumerate(zip(["0", *edges], edges, strict=False))]
    return [(0, "never"), *middle, (len(BOUNDS) + 1, f"over {edges[-1]} %")]


def shade(share: float) -> int:
    """Return the colour class of a share: 0 for none, then one more for each bound it has passed."""
    return 0 if share <= 0 else 1 + sum(share > bound for bound in BOUNDS)


def draw(name: str, pool: Pool) -> Drawing | None:
    """Draw a configuration's draft tree, over all repeats; None without a tree, or if no step drafted from it."""
    run = pool.first
    if not run.settings["method"].get("tree"):
        return None
    accepted, order = accepted_paths(pool.rows, TEMPLATE), template(run)
    nodes = by_node(accepted, order)
    if not accepted or not nodes:
        return None
    places, leaves = _layout([node.path for node in nodes])
    dots = [_dot(node, places) for node in sorted(nodes, key=lambda node: node.path)]
    deepest = max(len(node.path) for node in nodes)
    root = places[()]
    never = sum(node.accepted == 0 for node in nodes)
    words = [f"{len(nodes)} nodes, depth {deepest}, of which {never} were never accepted."]
    if order is None:
        changes = run.settings["method"].get("tree") == LEARNT
        why = "The tree changed during the run" if changes else "The records do not hold the tree"
        words.append(f"{why}: only nodes accepted at least once are drawn, and each counts as tried in every step.")
    width, height = root[0] + COLUMN * deepest + MARGIN, ROW * leaves + 2 * MARGIN
    return Drawing(name, width, height, root, dots, words)


def _layout(paths: list[RankPath]) -> tuple[dict[RankPath, tuple[float, float]], int]:
    """Place each node, the root on the left, and count the rows."""
    rows, count = layout(paths)
    return {path: (LEFT + COLUMN * len(path), MARGIN + ROW * (row + 0.5)) for path, row in rows.items()}, count


def _dot(node: Node, places: dict[RankPath, tuple[float, float]]) -> Dot:
    (x, y), (from_x, from_y) = places[node.path], places[node.path[:-1]]
    title = (
        f"ranks {spelled(node.path)}: accepted in {node.accepted:,} of {node.tried:,} steps "
        f"({100 * node.share:.1f} %), in {100 * node.given_parent:.1f} % of the {node.parent_accepted:,} that accepted "
        "its parent"
    )
    return Dot(x, y, from_x, from_y, shade(node.share), title)
