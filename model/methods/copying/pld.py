"""Prompt look-up decoding: copies what followed an earlier occurrence of the last n-gram.

As in transformers: the longest n-gram first, and of its occurrences the first one.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...engine import Device, Draft, Drafter, Session, Tree, Verification
from ..limits import check_whole
from .suffix_automaton import SuffixAutomaton


class PromptLookup(Drafter):
    """Drafts a chain copied from the prompt and the output so far.

    Args:
        eos: a copy stops before these, as in transformers.
    """

    def __init__(
        self,
        *,
        max_ngram: int = 2,
        draft_tokens: int = 10,
        eos: Collection[int] = (),
        device: Device = "cpu",
    ) -> None:
        check_whole("pld", 1, 64, max_ngram=max_ngram)  # each length is an index of its own
        check_whole("pld", 1, draft_tokens=draft_tokens)
        super().__init__(device)
        self.max_ngram = max_ngram
        self.draft_tokens = draft_tokens
        self.eos = frozenset(eos)
        self.max_nodes = 1 + draft_tokens

    def session(self) -> PromptLookupSession:
        return PromptLookupSession(self)


class PromptLookupSession(Session):
    drafter: PromptLookup

    def begin(self, prompt: list[int]) -> Draft:
        self._text = SuffixAutomaton(prompt)
        return self.draft(prompt[-1])

    def draft(self, root: int) -> Draft:
        drafter = self.drafter
        text = self._text.tokens
        start, _ = self._text.find(text, 1, drafter.max_ngram)
        copied = text[start : start + drafter.draft_tokens] if start else []
        copied = next(
            (copied[:i] for i, token in enumerate(copied) if token in drafter.eos), copied
        )
        return Draft(Tree.chain(len(copied)), torch.tensor([root, *copied]))

    def observe(self, verification: Verification) -> None:
        self._text.extend(verification.tokens)
