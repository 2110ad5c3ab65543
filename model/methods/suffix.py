"""Suffix drafts: what followed the longest suffix of the text before follows it again (SAM-Decoding, 2411.10666).

By default the copy is 4 times as long as its match; the paper always copies 40 tokens (`factor=40`).
"""

from __future__ import annotations

import math
import operator
from itertools import accumulate

import torch

from ..engine import DeviceDrafter, DeviceSession, Tree
from ..engine.sizing import Sizing, budget_of
from ..errors import UserError
from ..structures.history import History, TextSession
from ..structures.settings import check_whole
from ..structures.suffix_automaton import SuffixAutomaton

# Probability that the token that followed a match of 1, 2, 3, ... tokens follows it again, before that is learnt.
ACCEPT_PROBS = (0.1, 0.2, 0.45, 0.55, 0.65, 0.75, 0.85)
MATCHES = range(1, len(ACCEPT_PROBS) + 1)  # lengths of a match, the last one and longer ones alike


class Suffix(DeviceDrafter):
    """Drafts a chain copied from where the longest suffix of prompt and output occurred before.

    The automaton over prompt and output is the prompt's own, as in the paper, unless `history_tokens` says otherwise.

    Args:
        min_match: a match of fewer tokens drafts nothing.
        max_draft: at most so many tokens are copied (paper: 40, for code 16).
        factor: a match of m tokens drafts ceil(factor * m) tokens, at most max_draft (paper: max_draft always).
        history_tokens: earlier prompts and answers are matched against, too, up to so many tokens (paper: 0).
        nodes: auto: of these as many as pay, found while decoding; `auto:N`: at most N. None: as above.
        sizing: what finds that number, if other methods share it.
    """

    sizing: Sizing | None = None

    def __init__(
        self,
        vocab_size: int,
        *,
        min_match: int = 1,
        max_draft: int = 40,
        factor: float = 4.0,
        history_tokens: int = 0,
        nodes: str | None = None,
        device: torch.device | str = "cpu",
        sizing: Sizing | None = None,
    ) -> None:
        check_whole("suffix", 1, min_match=min_match, max_draft=max_draft)
        if not isinstance(factor, int | float) or not factor > 0:
            raise UserError(f"suffix: factor={factor} must be a number above 0")
        super().__init__(torch.device(device))
        if nodes is not None:
            if not isinstance(nodes, str):
                raise UserError(f"suffix: nodes={nodes} must be auto or auto:N; max_draft is the number")
            self.sizing = sizing or Sizing(f"auto:{min(budget_of(nodes), max_draft)}", self.device, filling=0.0)
            self.likelihoods = laws(max_draft)
        self.min_match, self.max_draft, self.factor = min_match, max_draft, factor
        self.max_nodes = 1 + max_draft
        self.history, self.stateful = History(history_tokens, SuffixAutomaton, vocab_size), history_tokens > 0
        self.stores = [self.history, *([self.sizing] if self.sizing else [])]
        self.line = torch.zeros(1 + max_draft, dtype=torch.long, device=self.device)  # the draft, filled every step

    def session(self) -> SuffixSession:
        return SuffixSession(self)

    def grow(self, root: torch.Tensor) -> torch.Tensor:
        self.line[:1] = root
        return self.line[: len(self.tree)]

    def step_state(self) -> dict[str, torch.Tensor]:
        return {}


def laws(most: int) -> list[list[float]]:
    """Return, for each length of a match in MATCHES, the likelihood of the root and of each copied token."""
    last = len(ACCEPT_PROBS)
    token_probs = [[ACCEPT_PROBS[min(match + place, last) - 1] for place in range(most)] for match in MATCHES]
    return [[1.0, *accumulate(probs, operator.mul)] for probs in token_probs]


class SuffixSession(TextSession[SuffixAutomaton], DeviceSession):
    """A sequence's text."""

    method: Suffix

    def choose(self) -> None:
        method, text = self.method, self.text
        count = min(method.max_draft, math.ceil(method.factor * text.length)) if text.length >= method.min_match else 0
        if count and method.sizing is not None:
            count = method.sizing.choose(method.likelihoods[min(text.length, len(ACCEPT_PROBS)) - 1][: 1 + count])
        method.tree = Tree.chain(count).on(method.device)
        if count:
            method.line[1 : 1 + count] = torch.tensor(text.copy(text.end, count))
