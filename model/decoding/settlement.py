"""How a static step ends, all on the device: what stands, where it goes in the cache, the next root and length."""

from __future__ import annotations

import torch

from .devices import on_host_like, wait
from .tree import Tree
from .verification import standing


class Settlement:
    """The end of steps with one tree of n nodes; buffers stay where they are, so that it can be captured.

    Attributes:
        root, length: int64 (1,) and (), the next ones once it was called.
        report: int64 (1 + max_depth + 1,), what the host is told: the deepest standing node, and the choices along its
            path.
        stands: bool (n,).
        source, to: int64 (max_depth + 1,): positions in the cache of the accepted path, and where it belongs; behind
            its end the last node again, which nobody sees.

    Args:
        tree: on the device.
        length: its attribute, the caller's.
    """

    def __init__(self, tree: Tree, length: torch.Tensor) -> None:
        n, depth, device = len(tree), tree.max_depth, tree.device
        self.tree, self.length = tree, length
        self.root = torch.zeros(1, dtype=torch.long, device=device)
        self.report = torch.zeros(2 + depth, dtype=torch.long, device=device)
        self.stands = torch.zeros(n, dtype=torch.bool, device=device)
        self.source, self.to = (torch.zeros(depth + 1, dtype=torch.long, device=device) for _ in range(2))
        self._depths = torch.arange(depth + 1, device=device)
        self._added = tree.depths + 1  # (n,): tokens that a step adds whose deepest standing node is this
        self._told = on_host_like(self.report)

    def __call__(self, tokens: torch.Tensor, choices: torch.Tensor) -> None:
        """Settle a step by its draft and what the target picks after each node, int64 (n,) each."""
        tree = self.tree
        _, winner = standing(tree, tokens, choices, out=self.stands)  # (1,)
        path = tree.paths.index_select(0, winner)[0]  # (max_depth + 1,), itself repeated at the end
        torch.add(path, self.length, out=self.source)
        torch.add(self._depths, self.length, out=self.to)
        torch.cat((winner, choices.index_select(0, path)), out=self.report)
        torch.index_select(choices, 0, winner, out=self.root)
        self.length.add_(self._added.index_select(0, winner)[0])

    def read(self) -> list[int]:
        """The report: the only transfer of a step, and where the host waits for it."""
        self._told.copy_(self.report, non_blocking=True)
        wait(self.report.device)
        return self._told.tolist()
