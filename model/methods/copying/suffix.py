"""Suffix drafts: copy what followed the text's longest suffix (SAM-Decoding, 2411.10666)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from ...engine import Device, DeviceDrafter, DeviceSession, Draft, State, Tree, Verification
from ...errors import UserError
from ...recycling import TokenRecycling
from ..limits import MAX_NODES, check_whole
from .history import History, TextSession
from .suffix_automaton import SuffixAutomaton


class Suffix(DeviceDrafter):
    """Drafts a chain copied from where the longest suffix of prompt and output occurred before."""

    def __init__(
        self,
        vocab_size: int,
        *,
        min_match: int = 1,
        max_draft: int = 40,
        factor: float = 4.0,
        history_tokens: int = 0,
        device: Device = "cpu",
    ) -> None:
        check_whole("suffix", 1, min_match=min_match, max_draft=max_draft)
        if not 0 < factor <= MAX_NODES:
            raise UserError(
                f"suffix: factor={factor} must be a number above 0, at most {MAX_NODES}"
            )

        super().__init__(device, vocab_size)
        self.min_match = min_match
        self.max_draft = max_draft
        self.factor = factor
        self.max_nodes = 1 + max_draft
        self.history = History(history_tokens, SuffixAutomaton, vocab_size)
        self.stateful = history_tokens > 0
        self.stores = [self.history]
        # the draft, filled every step
        self.line = torch.zeros(1 + max_draft, dtype=torch.long, device=self.device)

    def session(self) -> SuffixSession:
        return SuffixSession(self)

    def grow(self, root: Tensor) -> Tensor:
        return torch.cat((root, self.line[1 : len(self.tree)]))

    def step_state(self) -> State:
        return {}


class SuffixSession(TextSession, DeviceSession):
    drafter: Suffix

    def choose(self) -> None:
        drafter = self.drafter
        text = self.text
        count = 0
        if text.length >= drafter.min_match:
            count = min(drafter.max_draft, math.ceil(drafter.factor * text.length))
        drafter.tree = Tree.chain(count).on(drafter.device)
        if count:
            copied = torch.tensor(text.copy(text.end, count))
            drafter.line[1 : 1 + count].copy_(copied, non_blocking=True)


class SuffixRecycling(DeviceDrafter):
    """Suffix drafts where the match is long, else Token Recycling's tree (2411.10666, 3.4)."""

    stateful = True

    def __init__(
        self,
        vocab_size: int,
        tree: Tree | None = None,
        *,
        min_match: int = 5,
        max_draft: int = 40,
        factor: float = 4.0,
        history_tokens: int = 0,
        k: int = 8,
        recycle_prompt: bool = False,
        dtype: Literal["int64", "int32"] = "int64",
        device: Device = "cpu",
        eos: Collection[int] = (),
    ) -> None:
        super().__init__(device, vocab_size)
        self.suffix = Suffix(
            vocab_size,
            min_match=min_match,
            max_draft=max_draft,
            factor=factor,
            history_tokens=history_tokens,
            device=device,
        )
        self.partner = TokenRecycling(
            vocab_size,
            tree,
            k=k,
            recycle_prompt=recycle_prompt,
            dtype=dtype,
            device=device,
            eos=eos,
        )
        self.max_nodes = max(self.suffix.max_nodes, self.partner.max_nodes)
        self.needs = self.partner.needs
        self.stores = [*self.partner.stores, self.suffix.history]
        self.draft_with(self.partner)

    def session(self) -> SuffixRecyclingSession:
        return SuffixRecyclingSession(self)

    def draft_with(self, current: Suffix | TokenRecycling) -> None:
        self.current = current
        self.tree = current.tree
        self.source = "suffix" if current is self.suffix else "recycling"

    def grow(self, root: Tensor) -> Tensor:
        return self.current.grow(root)

    def learn(self, tokens: Tensor, candidates: Tensor, accepted: Tensor) -> None:
        self.partner.learn(tokens, candidates, accepted)

    def step_state(self) -> State:
        return self.partner.step_state()


class SuffixRecyclingSession(DeviceSession):
    drafter: SuffixRecycling

    def __init__(self, drafter: SuffixRecycling) -> None:
        super().__init__(drafter)
        self.suffix = drafter.suffix.session()
        self.partner = drafter.partner.session()

    def begin(self, prompt: list[int]) -> Draft | None:
        self.suffix.begin(prompt)
        return self.partner.begin(prompt)

    def observe_prompt(self, prompt: list[int], start: int, logits: Tensor) -> None:
        self.partner.observe_prompt(prompt, start, logits)

    def choose(self) -> None:
        drafter = self.drafter
        self.suffix.choose()
        copies = drafter.suffix.tree.max_depth > 0
        drafter.draft_with(drafter.suffix if copies else drafter.partner)

    def account(self, verification: Verification) -> None:
        self.suffix.account(verification)

    def close(self) -> None:
        self.suffix.close()
