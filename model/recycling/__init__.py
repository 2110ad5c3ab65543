"""Token Recycling (arXiv 2408.08696): adjacency matrix, tree templates, drafter."""

from .drafter import TokenRecycling
from .matrix import AdjacencyMatrix
from .templates import build_template

__all__ = ["AdjacencyMatrix", "TokenRecycling", "build_template"]
