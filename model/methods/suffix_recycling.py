"""Suffix drafts where the match is long, Token Recycling's tree elsewhere (SAM-Decoding's hybrid, 2411.10666, 3.4)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..engine import DeviceDrafter, DeviceSession, Draft, Tree, Verification
from ..engine.sizing import Sizing
from ..recycling import TokenRecycling
from .suffix import Suffix


class SuffixRecycling(DeviceDrafter):
    """Drafts each step by one of two methods: it copies a long match, otherwise it grows the recycled tree.

    The matrix learns from every step, whichever drafted it. Kept between prompts: the matrix alone.
    In step records the source is `suffix` or `recycling`; a copied chain's rank path is all zeros.

    Args:
        tree: the recycled tree; None with `nodes`.
        min_match: a match of so many tokens is copied from (paper: 5).
        max_draft, factor, history_tokens: as Suffix.
        nodes: auto: of both drafts as many as pay, found while decoding; `auto:N`: at most N. None: the tree's.
        others: as TokenRecycling.
    """

    stateful = True
    sizing: Sizing | None = None

    def __init__(
        self,
        vocab_size: int,
        tree: Tree | None = None,
        *,
        min_match: int = 5,
        max_draft: int = 40,
        factor: float = 4.0,
        history_tokens: int = 0,
        nodes: str | None = None,
        k: int = 8,
        recycle_prompt: bool = False,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str = "cpu",
        eos: Collection[int] = (),
    ) -> None:
        super().__init__(torch.device(device))
        if isinstance(nodes, str):
            self.sizing = Sizing(nodes, self.device)
        shared: dict[str, Any] = dict(nodes=nodes, sizing=self.sizing, device=device)
        copying: dict[str, Any] = dict(max_draft=max_draft, factor=factor, history_tokens=history_tokens)
        self.suffix = Suffix(vocab_size, min_match=min_match, **copying, **shared)
        self.recycling = TokenRecycling(
            vocab_size, tree, k=k, recycle_prompt=recycle_prompt, dtype=dtype, eos=eos, **shared
        )
        self.max_nodes = max(self.suffix.max_nodes, self.recycling.max_nodes)
        self.needs, self.stores = self.recycling.needs, [*self.recycling.stores, self.suffix.history]
        self.draft_with(self.recycling)

    def session(self) -> SuffixRecyclingSession:
        return SuffixRecyclingSession(self)

    def draft_with(self, chosen: Suffix | TokenRecycling) -> None:
        """Draft the next step with this one of the two."""
        self.chosen, self.tree = chosen, chosen.tree
        self.source = "suffix" if chosen is self.suffix else "recycling"

    def grow(self, root: torch.Tensor) -> torch.Tensor:
        return self.chosen.grow(root)

    def learn(self, tokens: torch.Tensor, candidates: torch.Tensor, accepted: torch.Tensor) -> None:
        self.recycling.learn(tokens, candidates, accepted)

    def step_state(self) -> dict[str, torch.Tensor]:
        return self.recycling.step_state()


class SuffixRecyclingSession(DeviceSession):
    """A session of each of the two methods; the text is the suffix session's."""

    method: SuffixRecycling

    def __init__(self, method: SuffixRecycling) -> None:
        super().__init__(method)
        self.suffix, self.recycling = method.suffix.session(), method.recycling.session()

    def begin(self, prompt: list[int]) -> Draft | None:
        self.suffix.begin(prompt)
        return self.recycling.begin(prompt)

    def choose(self) -> None:
        method = self.method
        self.suffix.choose()
        if method.suffix.tree.max_depth > 0:
            method.draft_with(method.suffix)
        else:
            self.recycling.choose()
            method.draft_with(method.recycling)

    def account(self, verification: Verification) -> None:
        if self.method.chosen is self.method.recycling:
            self.recycling.account(verification)
        self.suffix.account(verification)

    def passed(self, tokens: list[int]) -> None:
        self.suffix.passed(tokens)

    def observe_prompt(self, prompt: list[int], start: int, logits: torch.Tensor) -> None:
        self.recycling.observe_prompt(prompt, start, logits)

    def close(self) -> None:
        self.suffix.close()
