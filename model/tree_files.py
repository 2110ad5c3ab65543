"""Draft trees in files: a YAML list of rank paths."""

from __future__ import annotations

from pathlib import Path

import yaml

from .decoding import Tree
from .errors import UserError


def read_tree(path: str | Path) -> Tree:
    """Read a tree from YAML. Raises UserError naming the file if it is missing or malformed."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"tree: no file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"tree: {path} is not readable YAML ({' '.join(str(error).split())})") from None
    nodes = data.get("nodes") if isinstance(data, dict) else data
    if not isinstance(nodes, list) or not all(isinstance(node, list) for node in nodes):
        raise UserError(f"tree: {path} must hold a list of rank paths, such as [[0], [1], [0, 0]]")
    try:
        return Tree.from_rank_paths(nodes)
    except UserError as error:
        raise UserError(f"{error} (in {path})") from None
