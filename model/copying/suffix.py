"""Suffix drafts: what followed the longest suffix of the text before, follows it again (SAM-Decoding, 2411.10666)."""

from __future__ import annotations

import math

import torch

from ..decoding import DeviceDrafter, DeviceSession, Tree
from ..errors import UserError
from .carried_text import Carried, TextSession
from .suffix_automaton import SuffixAutomaton, automaton_class


class Suffix(DeviceDrafter):
    """Drafts a chain copied from where the longest suffix of prompt and output occurred before.

    The automaton over prompt and output is the prompt's own, as in the paper, unless `carry` says otherwise.

    Args:
        vocab_size: V.
        min_match: a match of fewer tokens drafts nothing.
        max_draft: at most so many tokens are copied (paper: 40, for code 16).
        factor: a match of m tokens drafts ceil(factor * m) tokens, at most max_draft (paper: max_draft always).
        carry: earlier prompts and answers are matched against, too, up to so many tokens (paper: 0).

    Raises:
        UserError: a setting out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        min_match: int = 1,
        max_draft: int = 40,
        factor: float = 4.0,
        carry: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("min_match", min_match), ("max_draft", max_draft)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"suffix: {name}={value} must be a whole number, at least 1")
        if not isinstance(factor, int | float) or not factor > 0:
            raise UserError(f"suffix: factor={factor} must be a number above 0")
        super().__init__(torch.device(device))
        self.min_match, self.max_draft, self.factor = min_match, max_draft, factor
        self.max_nodes = 1 + max_draft
        self.vocab_size, self.carried = vocab_size, Carried(carry, automaton_class())
        self.stateful = carry > 0
        self.line = torch.zeros(1 + max_draft, dtype=torch.long, device=self.device)  # the draft, filled every step

    def session(self) -> SuffixSession:
        return SuffixSession(self)

    def grow(self, root: torch.Tensor) -> torch.Tensor:
        self.line[:1] = root
        return self.line[: len(self.tree)]

    def reset(self) -> None:
        self.carried.reset()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.carried.state_dict()

    def step_state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.carried.load_state_dict(state, self.vocab_size)


class SuffixSession(TextSession[SuffixAutomaton], DeviceSession):
    """A sequence's text."""

    method: Suffix

    def choose(self) -> None:
        method, text = self.method, self.text
        count = min(method.max_draft, math.ceil(method.factor * text.length)) if text.length >= method.min_match else 0
        method.tree = Tree.chain(count).on(method.device)
        if count:
            method.line[1 : 1 + count] = torch.tensor(text.copy(text.end, count))
