"""The adjacency matrix (paper, 3.1): the k tokens that were likely to follow each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..devices import as_array
from ..engine import Device, State, checked
from ..errors import UserError


class AdjacencyMatrix:
    """`V x k` candidates, best first; zero until a token was seen."""

    def __init__(
        self,
        vocab_size: int,
        k: int,
        *,
        device: Device = "cpu",
        dtype: torch.dtype = torch.int64,
    ) -> None:
        if not 1 <= k <= vocab_size:
            raise UserError(f"k={k}: must be from 1 to the vocabulary's size ({vocab_size})")
        self.k = k
        self.candidates = torch.zeros((vocab_size, k), dtype=dtype, device=device)  # (V, k)
        self._array = as_array(self.candidates)

    @property
    def on_host(self) -> bool:
        return self._array is not None

    def look_up(self, tokens: Any, ranks: Any) -> Any:
        """Return M[token, rank] (m,), of tensors or, on the CPU, NumPy arrays."""
        if isinstance(tokens, Tensor):
            return self.candidates[tokens, ranks].long()  # an indexed write into int64 needs int64
        return self._array[tokens, ranks]

    def update(self, tokens: Tensor, top_k: Tensor, mask: Tensor | None = None) -> None:
        """Write `top_k` (..., n, k) into the rows of `tokens` (..., n); the last equal token wins.

        An indexed write of repeated rows leaves the winner to chance on CUDA, so every repeat
        writes the winner's row.

        Args:
            mask: bool (..., n), True for the nodes to write. None: all.
        """
        if self._array is not None:  # NumPy writes in order, so the last one wins by itself
            rows = tokens.numpy()
            best = top_k.numpy()
            if mask is not None:
                selected = mask.numpy()
                rows = rows[selected]
                best = best[selected]
            self._array[rows] = best
            return

        tokens = tokens.flatten()
        order = torch.arange(len(tokens), device=tokens.device)
        if mask is not None:
            order = order.masked_fill(~mask.flatten(), -1)

        # (n,): the last node with the same token
        last = order.masked_fill(tokens[:, None].ne(tokens), -1).amax(dim=1)
        new = top_k.flatten(0, -2).index_select(0, last.clamp(min=0))  # (n, k)
        new = new.to(self.candidates.dtype)
        if mask is not None:  # static shapes: a token whose nodes are all masked gets its old row
            new = torch.where((last < 0)[:, None], self.candidates.index_select(0, tokens), new)

        self.candidates.index_copy_(0, tokens, new)

    def reset(self) -> None:
        self.candidates.zero_()

    def state_dict(self) -> State:
        return {"candidates": self.candidates}

    def read(self, state: State) -> Tensor:
        shape = self.candidates.shape
        return checked(state, "candidates", shape, 0, shape[0] - 1)

    def load(self, candidates: Tensor) -> None:
        self.candidates.copy_(candidates)
