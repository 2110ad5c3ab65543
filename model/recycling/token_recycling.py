"""Token Recycling: drafts from the candidates that decoding discards (arXiv 2408.08696).

The official loop (github.com/Luowaterbi/TokenRecycling, evaluation/inference_recycling.py and model/recycling/) is
followed step by step; docs/design.md lists the departures.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from operator import or_
from typing import Any

import torch

from ..engine import DeviceDrafter, DeviceSession, Draft, Needs, Tree
from ..engine.devices import fastest
from ..engine.sampling import top_k
from ..errors import UserError
from .matrix import AdjacencyMatrix

UPDATES = ("all", "path", "root", "frozen")


class TokenRecycling(DeviceDrafter):
    """Drafts by breadth-first look-up in the adjacency matrix, learns from every node of every step.

    Args:
        vocab_size: V, the width of the target's logits.
        tree: the template; needs ranks below k.
        k: candidates kept per token.
        recycle_prompt: also write the prompt's own top-k (the paper does not).
        dtype: of the matrix, int64 or int32.
        update: whose candidates a step writes back: all nodes (as published), the accepted path, the root, or none
            (frozen: the matrix stays as it was loaded).
        eos: ids that end an answer. As in the official loop, a step in which a draft of these was accepted is not
            written back.

    Raises UserError if the template needs a rank that k candidates do not have, or at an unknown update.
    """

    stateful = True

    def __init__(
        self,
        vocab_size: int,
        tree: Tree,
        *,
        k: int = 8,
        recycle_prompt: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int64,
        update: str = "all",
        eos: Collection[int] = (),
    ) -> None:
        device = torch.device(device)
        if update not in UPDATES:
            raise UserError(f"method.update={update}: unknown; use {', '.join(UPDATES)}")
        if update == "frozen" and recycle_prompt:
            raise UserError("method.update=frozen and method.recycle_prompt=true contradict each other")
        super().__init__(device)
        self.matrix = AdjacencyMatrix(vocab_size, k, device=device, dtype=dtype)
        self.stores = [self.matrix]
        if tree.max_rank >= k:
            raise UserError(f"tree: needs candidates up to rank {tree.max_rank}, but k={k} keeps ranks 0 to {k - 1}")
        self.max_nodes = len(tree)
        self.update = update
        self.eos = frozenset(eos)
        self.needs = Needs(candidates=0 if update == "frozen" else k, prompt_logits=recycle_prompt)
        self.use_tree(tree.on(device))

    def use_tree(self, tree: Tree) -> None:
        """Draft from this tree from now on; at most as large as the one given first."""
        self.tree = tree
        self._tokens = torch.zeros(len(tree), dtype=torch.long, device=self.device)  # (n,), filled anew every step
        self._token_cells, parents, ranks = map(fastest, (self._tokens, tree.parents, tree.ranks))
        # Slices of each level's look-up, made once: its part of the tokens, parents, ranks.
        self._levels = [(self._token_cells[a:b], parents[a:b], ranks[a:b]) for a, b in tree.levels[1:]]

    def session(self) -> RecyclingSession:
        return RecyclingSession(self)

    def grow(self, root: torch.Tensor) -> torch.Tensor:
        """Grow the tree level by level: token(node) = M[token(parent), rank(node)] (paper, 3.2)."""
        self._token_cells[:1] = fastest(root)
        for level, parents, ranks in self._levels:
            level[:] = self.matrix.look_up(self._token_cells[parents], ranks)
        return self._tokens

    def learn(self, tokens: torch.Tensor, candidates: torch.Tensor, accepted: torch.Tensor) -> None:
        """Recycle: the top-k after every node, rejected ones too, replaces that token's candidates (paper, 3.3)."""
        mask = accepted if self.update == "path" else None
        if self.eos:
            ended = self._ended(fastest(tokens), fastest(accepted))
            if self.matrix.on_host:
                if ended:
                    return
            else:  # no host value is read: an all-False mask writes the old rows back
                mask = ~ended & (accepted if mask is not None else torch.ones_like(accepted))
        if self.update == "root":
            tokens, candidates, mask = tokens[:1], candidates[:1], None if mask is None else mask[:1]
        self.matrix.update(tokens, candidates, mask)

    def _ended(self, tokens: Any, accepted: Any) -> Any:
        """True if an accepted draft token ends the answer: bool (), NumPy's or the device's."""
        drafts, accepted = tokens[1:], accepted[1:]  # the root is no draft
        return reduce(or_, (((drafts == end) & accepted).any() for end in self.eos))

    def step_state(self) -> dict[str, torch.Tensor]:
        return self.matrix.state_dict()


class RecyclingSession(DeviceSession):
    """A sequence without state of its own: all of it is in the matrix."""

    method: TokenRecycling

    def begin(self, prompt: list[int]) -> Draft | None:
        """Return None: as in the official loop, the first step drafts and learns like all others."""
        return None

    def observe_prompt(self, prompt: list[int], start: int, logits: torch.Tensor) -> None:
        """With `recycle_prompt`: write the top-k after the prompt's tokens, too."""
        matrix = self.method.matrix
        matrix.update(
            torch.tensor(prompt[start : start + len(logits)], device=logits.device), top_k(logits, matrix.k)
        )  # (m, k)
