"""The tree that a run's own acceptance asks for: which nodes of its template were accepted most often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.errors import UserError

from ..records.rows import Row
from ..records.runs import Run, read_runs
from .acceptance import TEMPLATE, Accepted, Node, by_node, most_accepted, template
from .pools import Pool, pools

HALVES = {"all": None, "even": 0, "odd": 1}


def best(nodes: Sequence[Node], n: int) -> list[Node]:
    """The n nodes most often on an accepted path, best first.

    Raises:
        UserError: fewer than n nodes were tried.
    """
    if n > len(nodes):
        raise UserError(f"--nodes {n}: the run's tree has {len(nodes)} nodes; search from a larger one")
    return most_accepted(nodes, n)


def pick(runs: Sequence[Run], label: str | None) -> Pool:
    """The repeats and shards of the one run to search in: it must have drafted from a fixed template.

    Raises:
        UserError: none or several have, and no label tells which.
    """
    own = [run for run in runs if template(run) and label in (None, run.label)]
    if not own:
        known = ", ".join(sorted({run.label for run in runs}))
        raise UserError(f"no run with a fixed draft tree{f' of {label}' if label else ''}; there are {known}")
    names = sorted({run.label for run in own})
    if len(names) > 1:
        raise UserError(f"several runs with a tree; name one with --method: {', '.join(names)}")
    # of one label the largest tree has tried most, and of its runs the one with most questions
    return max(pools(own), key=lambda pool: (len(pool.first.draft_tree or []), pool.questions))


def half_of(rows: Sequence[Row], half: str) -> list[Row]:
    """All rows, or every other one of each subtask's: what one half finds is tried on the other."""
    if HALVES[half] is None:
        return list(rows)
    counts: Counter[str] = Counter()
    kept = []
    for row in rows:
        counts[str(row.get("category"))] += 1
        if counts[str(row.get("category"))] % 2 == HALVES[half]:
            kept.append(row)
    return kept


def find(folder: Path, nodes: int, *, method: str | None = None, half: str = "all") -> dict[str, Any]:
    """What is written to a template's file: the nodes, and where they come from."""
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: must be at least 1")
    pool = pick(read_runs(folder), method)
    accepted = Accepted.of((row for run in pool.runs for row in half_of(run.answers, half)), TEMPLATE)
    if not accepted.steps:
        raise UserError(f"{folder}: its records hold no drafted step")
    chosen = best(by_node(accepted, template(pool.first)), nodes)
    return {
        "source": f"{folder}: {pool.label}, {half} questions, {accepted.steps} steps",
        "expected_accepted": round(sum(node.stood for node in chosen) / accepted.steps, 4),
        "nodes": [list(path) for path in sorted((node.path for node in chosen), key=lambda p: (len(p), p))],
    }
