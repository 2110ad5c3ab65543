"""Masks of draft trees: additive, and not bool, as `eager` attention reads a bool mask wrongly and in silence."""

from __future__ import annotations

from collections import OrderedDict

import torch

from .tree import Tree

MOST = 64  # trees whose masks are kept
ALIGNED = 16  # numbers: CUDA's kernels take rows that begin at a multiple of this, and copy all others once more


class TreeMasks:
    """What the nodes of a tree attend to behind any number of committed tokens; no step builds a mask.

    A tree's buffer is (n, room + n): zeros, then the tree's own (n, n). A mask is a part of it, whose left edge is all
    that a longer past moves.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device, self.room = dtype, device, 0
        self._kept: OrderedDict[int, tuple[Tree, torch.Tensor]] = OrderedDict()

    def make_room(self, tokens: int) -> None:
        """So many tokens may be committed from now on."""
        if tokens > self.room:
            self.room = tokens
            self._kept.clear()

    def behind(self, past: int, tree: Tree) -> torch.Tensor:
        """Additive mask (n, past + n) of a tree behind `past` committed tokens."""
        if tree.once:
            return self._made(tree, past)
        kept = self._kept.get(id(tree))
        if kept is None:
            kept = self._kept[id(tree)] = (tree, self._made(tree, self.room))  # holds the tree: its id stays its own
            if len(self._kept) > MOST:
                self._kept.popitem(last=False)
        mask = kept[1][:, self.room - past :]
        return self._empty(*mask.shape).copy_(mask) if mask.is_cuda else mask

    def _made(self, tree: Tree, past: int) -> torch.Tensor:
        mask = self._empty(len(tree), past + len(tree)).zero_()
        mask[:, past:].masked_fill_(~tree.ancestors.to(self.device), torch.finfo(self.dtype).min)
        return mask

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        """(rows, columns), each row aligned."""
        width = -(-columns // ALIGNED) * ALIGNED
        return torch.empty(rows, width, dtype=self.dtype, device=self.device)[:, :columns]
