"""Muon for the matrices of the layers (Keller Jordan, 2024), AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(updates: Tensor, iterations: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix.  # (matrices, rows, columns)"""
    a, b, c = COEFFICIENTS
    tall = updates.size(-2) > updates.size(-1)
    x: Tensor = updates.mT if tall else updates
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, then an orthogonal update; matrices of one shape are stacked, which is faster on a CPU."""

    def __init__(self, params: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update to every matrix."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                shapes[p.shape].append(p)
            for params in shapes.values():
                self._update(params, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, params: list[Tensor], lr: float, momentum: float, decay: float) -> None:
        nesterov = []
        for p in params:
            assert p.grad is not None
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - momentum)
            nesterov.append(p.grad.lerp(buffer, momentum))
        scale = max(1.0, params[0].size(0) / params[0].size(1)) ** 0.5
        for p, update in zip(params, orthogonalize(torch.stack(nesterov)), strict=True):
            p.mul_(1 - lr * decay).add_(update, alpha=-lr * scale)
