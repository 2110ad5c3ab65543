"""Token Recycling (arXiv 2408.08696)."""

from .matrix import AdjacencyMatrix
from .templates import build_template
from .token_recycling import RecyclingSession, TokenRecycling

__all__ = ["AdjacencyMatrix", "RecyclingSession", "TokenRecycling", "build_template"]
