"""How a static step ends, all on the device: what stands, where it goes in the cache, the next root and length."""

from __future__ import annotations

import random

import torch

from . import kernels
from .tree import Draft, Tree
from .verification import standing, verify

MOST_NODES = 512  # that the kernel, which is one program, takes


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
        by_kernel: default: where it runs and is right.
    """

    def __init__(self, tree: Tree, length: torch.Tensor, *, by_kernel: bool | None = None) -> None:
        n, depth, device = len(tree), tree.max_depth, tree.device
        self.tree, self.length = tree, length
        self.root = torch.zeros(1, dtype=torch.long, device=device)
        self.report = torch.zeros(2 + depth, dtype=torch.long, device=device)
        self.stands = torch.zeros(n, dtype=torch.bool, device=device)
        self.source, self.to = torch.zeros(2, depth + 1, dtype=torch.long, device=device)
        self._depths = torch.arange(depth + 1, device=device)
        self._pinned = torch.zeros_like(self.report, device="cpu").pin_memory() if device.type == "cuda" else None
        if by_kernel is None:
            by_kernel = n <= MOST_NODES and not kernels.problem("verification", device)
        self._by_kernel = by_kernel

    def __call__(self, tokens: torch.Tensor, choices: torch.Tensor) -> None:
        """Settle a step by its draft and what the target picks after each node, int64 (n,) each."""
        if self._by_kernel:
            from .settlement_kernel import launch  # not above: it loads Triton

            with kernels.on(tokens.device):
                launch(self, tokens, choices)
            return
        tree = self.tree
        stands, winner = standing(tree, tokens, choices)  # (n,), (1,)
        path = tree.paths.index_select(0, winner)[0]  # (max_depth + 1,), itself repeated at the end
        self.stands.copy_(stands)
        torch.add(path, self.length, out=self.source)
        torch.add(self._depths, self.length, out=self.to)
        self.report.copy_(torch.cat((winner, choices.index_select(0, path))))
        self.root.copy_(choices.index_select(0, winner))
        self.length.add_(tree.depths.index_select(0, winner)[0] + 1)

    def read(self) -> list[int]:
        """The report: the only transfer of a step, and where the host waits for it."""
        if self._pinned is None:
            return self.report.tolist()
        self._pinned.copy_(self.report, non_blocking=True)  # into memory that the device writes without a detour
        torch.cuda.current_stream(self.report.device).synchronize()
        return self._pinned.tolist()


@kernels.tried("verification")
def _trial(device: torch.device) -> str:
    """Random trees and choices, against the walk over lists."""
    rng = random.Random(0)
    for n in (1, 2, 7, 40, 81, 200):
        parents = [0, *sorted(rng.randrange(max(1, i // 2)) for i in range(1, n))]
        tree = Tree(parents)
        length = torch.tensor(100 + n, device=device)
        own = Settlement(tree.on(device), length, by_kernel=True)
        for _ in range(4):
            before = int(length)
            tokens, choices = (torch.tensor([rng.randrange(2) for _ in range(n)]) for _ in range(2))
            apart = choices.to(device).repeat(3, 1).t()[:, 0]  # as the first column of candidates is
            own(tokens.to(device), apart)
            expected = verify(Draft(tree, tokens), choices)
            path = expected.path + expected.path[-1:] * (tree.max_depth - tree.depth_of[expected.node])
            found = (own.report, own.stands, own.source - before, own.to - before, own.root, length - before)
            right = (
                [expected.node, *choices[path].tolist()],
                expected.stands.tolist(),
                path,
                list(range(tree.max_depth + 1)),
                expected.tokens[-1:],
                len(expected.tokens),
            )
            if tuple(tensor.tolist() for tensor in found) != right:
                return f"the kernel does not settle a tree of {n} nodes as the walk does"
    return ""
