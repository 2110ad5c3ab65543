"""python -m evaluation.tree_search FOLDER --nodes N --output FILE: the tree that a run's own acceptance asks for.

From the step records of a run the acceptance of each rank path: how often its node stood where its parent stood. The
best tree of n nodes takes the nodes most often on an accepted path; a node is never on one more often than its parent,
so the n best are a tree. Write it as a template and use it: tree=file tree.path=FILE.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from model.decoding.tree import RankPath
from model.errors import UserError
from model.files import write_text

from .records.rows import Row
from .records.runs import Run, read_runs
from .running.errors import user_errors
from .statistics.acceptance import Node, by_rank_path
from .statistics.pools import pools

HALVES = {"all": None, "even": 0, "odd": 1}


def search(acceptance: dict[RankPath, Node], n: int) -> list[RankPath]:
    """The n nodes most often on an accepted path, best first; of equals the shallower, then the better rank.

    A node stands at most as often as its parent, so each comes after its parent.

    Raises:
        UserError: fewer than n nodes were tried.
    """
    if n > len(acceptance):
        raise UserError(f"--nodes {n}: the run's tree has {len(acceptance)} nodes; search from a larger one")
    return sorted(acceptance, key=lambda path: (-acceptance[path].stood, len(path), path))[:n]


def pick(runs: Sequence[Run], label: str | None) -> list[Run]:
    """The repeats and shards of the one run to search in: it must have drafted from a fixed template.

    Raises:
        UserError: none or several have, and no label tells which.
    """
    own = [r for r in runs if r.draft_tree and r.settings["method"].get("tree") != "auto"]
    own = [r for r in own if label is None or r.label == label]
    kinds = pools(own)
    if not kinds:
        known = ", ".join(sorted({run.label for run in runs}))
        raise UserError(f"no run with a fixed draft tree{f' of {label}' if label else ''}; there are {known}")
    if len(kinds) > 1:
        names = sorted({run.label for run in own})
        if len(names) > 1:
            raise UserError(f"several runs with a tree; name one with --method: {', '.join(names)}")
    # of one label the largest tree has tried most, and of its runs the one with most questions
    return list(max(kinds, key=lambda pool: (len(pool.first.draft_tree or []), pool.questions)).runs)


def half_of(rows: Sequence[Row], half: str) -> list[Row]:
    """All rows, or every other one of each subtask's: what one half finds is tried on the other."""
    if HALVES[half] is None:
        return list(rows)
    seen: Counter[str] = Counter()
    kept = []
    for row in rows:
        seen[str(row.get("category"))] += 1
        if seen[str(row.get("category"))] % 2 == HALVES[half]:
            kept.append(row)
    return kept


def find(folder: Path, nodes: int, *, method: str | None = None, half: str = "all") -> dict[str, Any]:
    """What is written to the file: the nodes, and where they come from."""
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: must be at least 1")
    runs = pick(read_runs(folder), method)
    rows = [row for run in runs for row in half_of(run.answers, half)]
    acceptance = by_rank_path(rows, runs[0].draft_tree or [])
    tried = max((node.tried for node in acceptance.values()), default=0)
    if not tried:
        raise UserError(f"{folder}: its records hold no drafted step")
    chosen = search(acceptance, nodes)
    return {
        "source": f"{folder}: {runs[0].label}, {half} questions, {tried} steps",
        "expected_accepted": round(sum(acceptance[path].stood for path in chosen) / tried, 4),
        "nodes": [list(path) for path in sorted(chosen, key=lambda p: (len(p), p))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evaluation.tree_search", description=__doc__)
    parser.add_argument("folder", type=Path, help="an experiment's results, e.g. results/quickstart")
    parser.add_argument("--nodes", type=int, required=True, help="of the tree, the root not counted")
    parser.add_argument("--output", type=Path, required=True, help="the template's YAML file")
    parser.add_argument("--method", help="label of the run, where several drafted from a tree, e.g. 'recycling (hot)'")
    parser.add_argument("--half", choices=list(HALVES), default="all", help="search in one half of the questions only")
    arguments = parser.parse_args()
    with user_errors():
        found = find(arguments.folder, arguments.nodes, method=arguments.method, half=arguments.half)
        text = yaml.safe_dump({k: v for k, v in found.items() if k != "nodes"}, sort_keys=False)
        text += "nodes:\n" + "".join(f"- {node}\n" for node in found["nodes"])
        write_text(arguments.output, text)
        print(
            f"{arguments.output}: {len(found['nodes'])} nodes, {found['expected_accepted']:.2f} drafts accepted a step"
        )
        print(f"use it: tree=file tree.path={arguments.output}")


if __name__ == "__main__":
    main()
