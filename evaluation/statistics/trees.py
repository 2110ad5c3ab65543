"""Trees that runs ask for: nodes accepted most often; what tree=auto chose and promised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.engine.sizing import steps_in_words
from model.errors import UserError

from ..records.runs import Run, read_runs
from .acceptance import TREE_SOURCE, accepted_paths, by_node, fixed_tree, most_accepted
from .pools import Pool, pools


def pick(runs: Sequence[Run], label: str | None) -> Pool:
    """Choose the repeats and shards of the one run to search in: it must have drafted from a fixed tree.

    Raises:
        UserError: none or several have, and no label tells which.
    """
    fixed = [run for run in runs if fixed_tree(run) and label in (None, run.label)]
    if not fixed:
        labels = ", ".join(sorted({run.label for run in runs}))
        raise UserError(f"no run with a fixed draft tree{f' of {label}' if label else ''}; there are {labels}")
    names = sorted({run.label for run in fixed})
    if len(names) > 1:
        raise UserError(f"several runs with a tree; name one with --method: {', '.join(names)}")
    # of one label the largest tree has tried most, and of its runs the one with most questions
    return max(pools(fixed), key=lambda pool: (len(pool.identity.draft_tree or []), pool.questions))


def find_tree(folder: Path, nodes: int, method: str | None = None) -> dict[str, Any]:
    """Return what is written to a tree's file: the nodes, and where they come from."""
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: must be at least 1")
    pool = pick(read_runs(folder), method)
    accepted = accepted_paths(pool.rows, TREE_SOURCE)
    if not accepted:
        raise UserError(f"{folder}: its records hold no drafted step")
    candidates = by_node(accepted, fixed_tree(pool.first))
    if nodes > len(candidates):
        raise UserError(f"--nodes {nodes}: the run's tree has {len(candidates)} nodes; search from a larger one")
    chosen = most_accepted(candidates, nodes)
    return {
        "source": f"{folder}: {pool.label}, {accepted.total()} steps",
        "expected_accepted": round(sum(node.accepted for node in chosen) / accepted.total(), 4),
        "nodes": [list(path) for path in sorted((node.path for node in chosen), key=lambda p: (len(p), p))],
    }


def auto_lines(pooled: Sequence[Pool]) -> list[str]:
    """Word the size that the drafter of a run chose, and the speed that it predicted; one line a run of tree=auto."""
    lines = []
    for pool in pooled:
        for run in pool.runs:
            figures = run.summary.get("drafter") or {}
            if figures.get("predicted_speedup") and "plain_steps" in figures:  # older records do not tell plain steps
                repeat = f", repeat {run.identity.repeat}" if len(pool.runs) > 1 else ""
                lines.append(
                    f"{pool.name}{repeat} on {pool.group['bench']}: {steps_in_words(figures)}; decoding speed over "
                    f"vanilla {figures['predicted_speedup']:.2f} x predicted"
                )
    return lines
