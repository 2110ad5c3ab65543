"""python -m evaluation.tree_search FOLDER --nodes N --output FILE: the best tree by a run's measured acceptance.

The step records of a run give the acceptance of each rank path: how often its node was accepted when its parent was.
The best tree has the n nodes most often on an accepted path. A node is never on one more often than its parent, so they
form a tree. Use the written template with tree=file tree.path=FILE.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import yaml
from hydra.core.override_parser.types import Quote, QuotedString

from model.files import write_text

from .errors import user_errors
from .statistics.trees import find_tree


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evaluation.tree_search", description=__doc__)
    parser.add_argument("folder", type=Path, help="an experiment's results, e.g. results/quickstart")
    parser.add_argument("--nodes", type=int, required=True, help="of the tree, the root not counted")
    parser.add_argument("--output", required=True, help="the template's YAML file")
    parser.add_argument("--method", help="label of the run, where several drafted from a tree, e.g. 'recycling (hot)'")
    given = parser.parse_args()
    with user_errors():
        tree = find_tree(given.folder, given.nodes, given.method)
        nodes = [f"- {node}\n" for node in tree.pop("nodes")]
        write_text(Path(given.output), "".join([yaml.safe_dump(tree, sort_keys=False), "nodes:\n", *nodes]))
        print(f"{given.output}: {len(nodes)} nodes, {tree['expected_accepted']:.2f} drafts accepted a step")
        bare = re.fullmatch(r"[\w./-]+", given.output)  # of letters that Hydra's grammar reads without quotes
        path = given.output if bare else QuotedString(given.output, Quote.single).with_quotes()
        print(f"use it: tree=file {shlex.quote(f'tree.path={path}')}")


if __name__ == "__main__":
    main()
