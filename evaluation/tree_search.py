"""python -m evaluation.tree_search FOLDER --nodes N --output FILE: the best tree by a run's
measured acceptance.

It has the n nodes most often on an accepted path. A node is never on one more often than its
parent, so they form a tree. Use the written template with tree=file tree.path=FILE.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from model.errors import Parser, UserError
from model.files import local_path, write_text

from .configuration.jobs import quoted
from .errors import user_errors
from .records.runs import Run, read_runs
from .statistics.acceptance import TREE_SOURCE, accepted_paths, by_node, most_accepted
from .statistics.pools import Pool, pools


def pick(runs: Sequence[Run], label: str | None) -> Pool:
    """Choose the run with a fixed tree to search in, with its repeats and shards.

    Raises UserError if there is none, or if several labels have one and `label` names none.
    """
    fixed = [run for run in runs if run.draft_tree and label in (None, run.label)]
    if not fixed:
        labels = ", ".join(sorted({run.label for run in runs}))
        raise UserError(
            f"no run with a fixed draft tree{f' of {label}' if label else ''}; there are {labels}"
        )

    names = sorted({run.label for run in fixed})
    if len(names) > 1:
        raise UserError(f"several runs with a tree; name one with --method: {', '.join(names)}")
    # among runs of one label, the largest tree has tried most nodes; ties go to the run with most
    # questions
    return max(pools(fixed), key=lambda pool: (len(pool.first.draft_tree), pool.questions))


def find_tree(folder: Path, nodes: int, method: str | None = None) -> dict[str, Any]:
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: must be at least 1")
    pool = pick(read_runs(folder), method)
    accepted = accepted_paths(pool.rows, TREE_SOURCE)
    if not accepted:
        raise UserError(f"{folder}: its records hold no drafted step")
    candidates = by_node(accepted, pool.first.draft_tree)
    if nodes > len(candidates):
        raise UserError(
            f"--nodes {nodes}: the run's tree has {len(candidates)} nodes; search from a larger one"
        )

    chosen = most_accepted(candidates, nodes)
    paths = sorted((node.path for node in chosen), key=lambda path: (len(path), path))
    return {
        "source": f"{folder}: {pool.label}, {accepted.total()} steps",
        "expected_accepted": round(sum(node.accepted for node in chosen) / accepted.total(), 4),
        "nodes": [list(path) for path in paths],
    }


def main() -> None:
    parser = Parser(prog="python -m evaluation.tree_search", description=__doc__)
    parser.add_argument(
        "folder",
        type=local_path,
        help="an experiment's results, e.g. results/quickstart",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        required=True,
        help="of the tree, the root not counted",
    )
    parser.add_argument("--output", type=local_path, required=True, help="the template's YAML file")
    parser.add_argument(
        "--method",
        help="label of the run, where several drafted from a tree, e.g. 'recycling (hot)'",
    )

    with user_errors():
        options = parser.parse_args()
        tree = find_tree(options.folder, options.nodes, options.method)
        nodes = [f"- {node}\n" for node in tree.pop("nodes")]
        write_text(
            options.output, "".join([yaml.safe_dump(tree, sort_keys=False), "nodes:\n", *nodes])
        )
        print(
            f"{options.output}: {len(nodes)} nodes,"
            f" {tree['expected_accepted']:.2f} drafts accepted a step"
        )
        path = str(options.output)
        setting = f"tree.path={quoted(path)}" if "," in path else f"tree.path={path}"
        print(f"use it: tree=file {shlex.quote(setting)}")


if __name__ == "__main__":
    main()
