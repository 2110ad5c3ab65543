"""SuffixDecoding: drafts what most often followed the text's end (arXiv 2411.04975).

The rules are those of the public code as vLLM drives it, github.com/snowflakedb/ArcticInference at
9d46438. The prefill, which commits one token there, is the first step here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...engine import Device, Draft, Drafter, Session, State, Verification, checked
from ...engine.rule.tree import arranged
from ...errors import UserError
from ..limits import MAX_KEPT, MAX_NODES, check_whole
from .suffix_trie import Drafted, GrowingText, Limits, SuffixTrie

BEGINS = -1  # in the log, instead of a token: an answer begins


class SuffixDecoding(Drafter):
    """Drafts from a trie of this request or from one of all answers, a chain by default.

    The draft of the greatest sum of probabilities is verified; ties go to the request's trie.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        nodes: int = 64,
        depth: int = 64,
        factor: float = 1.0,
        offset: float = 0.0,
        min_token_prob: float = 0.1,
        branches: bool = False,
        cached_answers: int = 100000,
        device: Device = "cpu",
    ) -> None:
        check_whole("suffix_decoding", 1, nodes=nodes)
        check_whole("suffix_decoding", 2, depth=depth)
        check_whole("suffix_decoding", 0, MAX_KEPT, cached_answers=cached_answers)
        _check_number(MAX_NODES, factor=factor, offset=offset)
        _check_number(1, min_token_prob=min_token_prob)
        super().__init__(device, vocab_size)
        self.max_nodes = 1 + nodes
        self.stateful = cached_answers > 0
        self.depth = depth
        self.limits = Limits(
            nodes, np.float32(factor), np.float32(offset), np.float32(min_token_prob), branches
        )
        self.answers = Answers(depth, cached_answers, vocab_size)
        self.stores = [self.answers]

    def session(self) -> SuffixDecodingSession:
        return SuffixDecodingSession(self)


def _check_number(limit: float, **settings: Any) -> None:
    for name, value in settings.items():
        if not 0 <= value <= limit:
            raise UserError(f"suffix_decoding: {name}={value} must be a number from 0 to {limit}")


@dataclass
class Answers:
    depth: int
    max_texts: int
    vocab_size: int

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.texts: dict[GrowingText, None] = {}
        self.trie = SuffixTrie(self.depth)

    def begin(self) -> GrowingText:
        """Start an answer. If there are too many, drop the oldest one, even an unfinished one."""
        text = GrowingText()
        if self.max_texts:
            self.texts[text] = None
        if len(self.texts) > self.max_texts:
            oldest = next(iter(self.texts))
            del self.texts[oldest]
            self.trie.remove(oldest)
        return text

    def extend(self, text: GrowingText, tokens: list[int]) -> None:
        if text in self.texts:
            self.trie.extend(text, tokens)

    def state_dict(self) -> State:
        """`answers`, int32 (n,), with BEGINS before each; `orders`, int32 (m,), of equal tokens."""
        if not self.max_texts:
            return {}
        log: list[int] = []
        for text in self.texts:
            log += [BEGINS, *text.tokens]
        return {
            "answers": torch.tensor(log, dtype=torch.int32),
            "orders": torch.tensor(self.trie.orders(), dtype=torch.int32),
        }

    def read(self, state: State) -> Answers | None:
        if not self.max_texts:
            return None
        last = self.vocab_size - 1  # token id
        answers = Answers(self.depth, self.max_texts, self.vocab_size)
        log = checked(state, "answers", (-1,), BEGINS, last).tolist()
        if log[:1] not in ([], [BEGINS]):
            raise UserError("start: the saved answers do not begin")
        for token in log:
            if token == BEGINS:
                text = answers.begin()
            else:
                answers.extend(text, [token])
        answers.trie.reorder(checked(state, "orders", (-1,), 0, last).tolist())
        return answers

    def load(self, answers: Answers) -> None:
        self.texts = answers.texts
        self.trie = answers.trie


class SuffixDecodingSession(Session):
    drafter: SuffixDecoding

    def begin(self, prompt: list[int]) -> Draft | None:
        self._trie = SuffixTrie(self.drafter.depth)
        self._text = GrowingText()
        self._trie.extend(self._text, prompt)
        self._answer = self.drafter.answers.begin()
        return super().begin(prompt)

    def draft(self, root: int) -> Draft:
        source, drafted = self.look_up()
        if not drafted.tokens:
            return self.drafter.root_alone(root)
        parents = [0, *(parent + 1 for parent in drafted.parents)]
        draft, _ = arranged([root, *drafted.tokens], parents, source)
        return draft

    def look_up(self) -> tuple[str, Drafted]:
        context = self._text.tokens[-self.drafter.depth :]
        limits = self.drafter.limits
        drafted = self._trie.draft(context, limits)
        of_answers = self.drafter.answers.trie.draft(context, limits)
        if drafted.score >= of_answers.score:
            return "request", drafted
        return "answers", of_answers

    def observe(self, verification: Verification) -> None:
        self._trie.extend(self._text, verification.tokens)
        self.drafter.answers.extend(self._answer, verification.tokens)
