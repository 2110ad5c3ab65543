"""Token Recycling (arXiv 2408.08696): adjacency matrix, tree templates, drafter; and the tree for the machine.

From outside: what is named here, `auto` (which learns by `acceptance`), and the law of `templates`.
"""

from .matrix import AdjacencyMatrix
from .templates import build_template
from .token_recycling import RecyclingSession, TokenRecycling

__all__ = ["AdjacencyMatrix", "RecyclingSession", "TokenRecycling", "build_template"]
