"""Token Recycling: drafts from the candidates that decoding discards (arXiv 2408.08696).

docs/design.md lists the departures from the official loop.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ..devices import fastest
from ..engine import Device, DeviceDrafter, DeviceSession, Draft, Needs, State, Tree, top_k
from ..errors import UserError
from .matrix import AdjacencyMatrix
from .templates import build_template

UPDATES = ("all", "path", "root", "frozen")


class TokenRecycling(DeviceDrafter):
    """Drafts by breadth-first look-up in the adjacency matrix; learns from every node.

    Args:
        tree: the template; needs ranks below k. None: the published one.
        nodes: in place of a tree, the number of nodes of the published order.
        eos: as in the official loop, a step that accepted one of these as a draft writes nothing.
    """

    stateful = True
    joins = True

    def __init__(
        self,
        vocab_size: int,
        tree: Tree | None = None,
        *,
        nodes: int | str | None = None,
        k: int = 8,
        recycle_prompt: bool = False,
        device: Device = "cpu",
        dtype: Literal["int64", "int32"] = "int64",
        update: str = "all",
        eos: Collection[int] = (),
    ) -> None:
        if update not in UPDATES:
            raise UserError(f"method.update={update}: unknown; use {', '.join(UPDATES)}")
        if update == "frozen" and recycle_prompt:
            raise UserError(
                "method.update=frozen and method.recycle_prompt=true contradict each other"
            )

        super().__init__(device, vocab_size)
        self.matrix = AdjacencyMatrix(
            vocab_size, k, device=self.device, dtype=getattr(torch, dtype)
        )
        self.stores = [self.matrix]
        self.update = update
        self._ends = fastest(torch.tensor(sorted(eos), dtype=torch.long, device=self.device))
        self.needs = Needs(candidates=0 if update == "frozen" else k, prompt_logits=recycle_prompt)
        if isinstance(nodes, str):
            raise UserError(
                f"recycling: nodes={nodes}: must be a number; method dynamic tunes its own"
            )
        if tree is not None and nodes is not None:
            raise UserError(
                f"recycling: takes a tree, or a number of nodes (nodes={nodes}), and not both"
            )
        if tree is None:
            tree = build_template("2.2.2" if nodes is None else "best", nodes=nodes, k=k)
        if tree.max_rank >= k:
            raise UserError(
                f"tree: needs candidates up to rank {tree.max_rank}, but k={k} keeps ranks 0 to"
                f" {k - 1}"
            )

        self.draft_tree = tree
        self.max_nodes = len(tree)
        self.tree = tree.on(self.device)
        # of each level: its parents, numbered within the level above, and ranks
        self._look_ups = [
            (fastest(self.tree.parents[a:b] - above), fastest(self.tree.ranks[a:b]))
            for (above, _), (a, b) in pairwise(self.tree.levels)
        ]

    def session(self) -> RecyclingSession:
        return RecyclingSession(self)

    def grow(self, root: Tensor) -> Tensor:
        """Grow level by level: token(node) = M[token(parent), rank(node)] (paper, 3.2)."""
        level = fastest(root)
        levels = [level]
        for parents, ranks in self._look_ups:
            level = self.matrix.look_up(level[..., parents], ranks)
            levels.append(level)
        return torch.cat([torch.as_tensor(level) for level in levels], -1)

    def learn(self, tokens: Tensor, candidates: Tensor, accepted: Tensor) -> None:
        """Recycle: every node's top-k, even a rejected one's, replaces its token's row (3.3)."""
        mask = accepted if self.update == "path" else None
        if len(self._ends):
            # the root is no draft
            is_end = (fastest(tokens)[..., 1:, None] == self._ends).any(-1)
            ended = (is_end & fastest(accepted)[..., 1:]).any(axis=-1, keepdims=True)
            # on a device no host value is read: an all-False mask writes the old rows back
            if not self.matrix.on_host or ended.any():
                mask = torch.as_tensor(~ended) & (accepted | (mask is None))
        if self.update == "root":
            tokens = tokens[..., :1]
            candidates = candidates[..., :1, :]
            mask = None if mask is None else mask[..., :1]

        self.matrix.update(tokens, candidates, mask)

    def step_state(self) -> State:
        return self.matrix.state_dict()


class RecyclingSession(DeviceSession):
    drafter: TokenRecycling

    def begin(self, prompt: list[int]) -> Draft | None:
        """Return None, as in the official loop: the first step drafts and learns, too."""
        return None

    def observe_prompt(self, prompt: list[int], start: int, logits: Tensor) -> None:
        matrix = self.drafter.matrix
        tokens = torch.tensor(prompt[start : start + len(logits)], device=logits.device)
        matrix.update(tokens, top_k(logits, matrix.k))  # (m, k)
