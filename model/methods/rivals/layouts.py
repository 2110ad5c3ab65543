"""Drafters that choose one of a few fixed trees in each step, filled in on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...engine import DeviceDrafter, RankPath, Tree


class Layout:
    def __init__(self, paths: Sequence[RankPath], device: torch.device) -> None:
        """Make a tree of nodes in the drafter's own order, the root, (), first."""
        index = {path: i for i, path in enumerate(paths)}
        self.tree = Tree.from_rank_paths(paths[1:]).on(device)
        # each node's index in `paths`, and the reverse
        self.order = [index[path] for path in self.tree.rank_paths]
        self.node_at = {index: node for node, index in enumerate(self.order)}
        self.tokens = torch.zeros_like(self.tree.depths)  # int64 (n,), filled anew every step


class LayoutDrafter(DeviceDrafter):
    # tokens in the layout's own order
    def lay_out(self, layout: Layout, tokens: Sequence[int]) -> None:
        listed = torch.tensor([tokens[i] for i in layout.order])
        layout.tokens.copy_(listed, non_blocking=True)
        self.tree = layout.tree
        self._tokens = layout.tokens

    def grow(self, root: Tensor) -> Tensor:
        return torch.cat((root, self._tokens[1:]))
