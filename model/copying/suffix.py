"""Suffix drafts: what followed the longest suffix of the text before, follows it again (SAM-Decoding, 2411.10666)."""

from __future__ import annotations

import math

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..decoding import DeviceDrafter, DeviceSession, Draft, Tree, Verification
from ..errors import UserError
from .carried_text import CarriedText, ReadingSession
from .suffix_automaton import SuffixAutomaton

MAX_CORPUS = 1 << 22  # tokens; an automaton takes some 500 bytes for each


class Suffix(DeviceDrafter):
    """Drafts a chain copied from where the longest suffix of prompt and output stood before, or from a corpus.

    The automaton over prompt and output is the prompt's own, as in the paper, unless `carry` says otherwise. The
    corpus' automaton is built once and never changes.

    Args:
        vocab_size: V; the corpus' ids must be below it.
        min_match: a match of fewer tokens drafts nothing.
        max_draft: at most so many tokens are copied (paper: 40, for code 16).
        factor: a match of m tokens drafts ceil(factor * m) tokens, at most max_draft (paper: max_draft always).
        corpus_path: token ids to match against besides: a safetensors file with one tensor `ids`, int64 (n,).
        corpus_bias: the corpus is copied from only where its match is longer by more than this (paper: 0 alone, 5 in a
            hybrid).
        carry: earlier prompts and answers are matched against, too, up to so many tokens (paper: 0).

    Raises:
        UserError: a setting out of range; a corpus that is missing, broken, too large, or of another vocabulary.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        min_match: int = 1,
        max_draft: int = 40,
        factor: float = 4.0,
        corpus_path: str | None = None,
        corpus_bias: int = 0,
        carry: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        whole = {"min_match": (min_match, 1), "max_draft": (max_draft, 1), "corpus_bias": (corpus_bias, 0)}
        for name, (value, least) in whole.items():
            if not isinstance(value, int) or value < least:
                raise UserError(f"suffix: {name}={value} must be a whole number, at least {least}")
        if not isinstance(factor, int | float) or not factor > 0:
            raise UserError(f"suffix: factor={factor} must be a number above 0")
        super().__init__(torch.device(device))
        self.min_match, self.max_draft, self.factor, self.corpus_bias = min_match, max_draft, factor, corpus_bias
        self.max_nodes = 1 + max_draft
        self.vocab_size, self.carried = vocab_size, CarriedText(carry)
        self.stateful = carry > 0
        self.corpus = SuffixAutomaton(load_corpus(corpus_path, vocab_size)) if corpus_path is not None else None
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


class SuffixSession(ReadingSession, DeviceSession):
    """A sequence's text, and its place in the corpus."""

    method: Suffix
    _place = (0, 0)  # in the corpus: state and length of the longest match

    def begin(self, prompt: list[int]) -> Draft | None:
        self._follow(prompt)
        return super().begin(prompt)

    def match(self) -> tuple[int, SuffixAutomaton, int]:
        """The longest match: its length in tokens, whose text it stands in, and the place where it was continued."""
        text, corpus = self.text, self.method.corpus
        if corpus is not None:
            state, length = self._place
            if length > text.length + self.method.corpus_bias and corpus.continued(state) < len(corpus.tokens):
                return length, corpus, corpus.continued(state)
        return text.length, text, text.end

    def choose(self) -> None:
        own = self.method
        length, source, end = self.match()
        count = min(own.max_draft, math.ceil(own.factor * length)) if length >= own.min_match else 0
        own.tree = Tree.chain(count).on(own.device)
        if count:
            own.line[1 : 1 + count] = torch.tensor(source.copy(end, count))

    def account(self, verification: Verification) -> None:
        super().account(verification)
        self._follow(verification.tokens)

    def _follow(self, tokens: list[int]) -> None:
        """Follow the tokens in the corpus."""
        if self.method.corpus is not None:
            for token in tokens:
                self._place = self.method.corpus.transfer(*self._place, token)


def load_corpus(path: str, vocab_size: int) -> list[int]:
    """Token ids from a safetensors file. Raises UserError naming it if it is no such file or does not fit."""
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise UserError(f"corpus_path={path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"corpus_path={path}: is not a safetensors file ({error})") from None
    ids = tensors.get("ids")
    if ids is None or ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or not ids.numel():
        raise UserError(f"corpus_path={path}: must hold token ids, whole numbers (n,), under the name 'ids'")
    if len(ids) > MAX_CORPUS:
        raise UserError(
            f"corpus_path={path}: {len(ids)} tokens are too many for an automaton in memory (at most {MAX_CORPUS}); "
            "method=rest takes more"
        )
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise UserError(f"corpus_path={path}: holds ids outside the model's vocabulary of {vocab_size}")
    return [int(i) for i in ids.tolist()]
