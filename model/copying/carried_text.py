"""Text that is carried from prompt to prompt, so that what an earlier answer said can be copied."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import UserError
from .suffix_automaton import SuffixAutomaton


def carried_on(text: SuffixAutomaton, prompt: Iterable[int], carry: int) -> SuffixAutomaton:
    """The text of the next prompt, behind up to `carry` tokens of earlier prompts and answers.

    More than that is cut to the newest half, so that a cut is rare: it reads that half again. A token takes some 440
    bytes, so 32768 of them 14 MB. 0: the prompt alone.
    """
    if carry == 0:
        return SuffixAutomaton(prompt)
    if len(text.tokens) > carry:
        text = SuffixAutomaton(text.tokens[-(carry // 2) :])
    text.extend(prompt)
    return text


def check_carry(carry: int) -> int:
    """The number of tokens, if it is one. Raises UserError."""
    if not isinstance(carry, int) or isinstance(carry, bool) or carry < 0 or carry == 1:
        raise UserError(f"carry={carry}: must be 0 (the prompt's own text alone) or a number of tokens from 2")
    return carry


def text_state(text: SuffixAutomaton) -> dict[str, torch.Tensor]:
    """The text as a drafter's state: `text`, int64 (n,)."""
    return {"text": torch.tensor(text.tokens, dtype=torch.int64)}


def text_from(state: dict[str, torch.Tensor], vocab_size: int) -> SuffixAutomaton:
    """The text of a saved state; empty where it holds none. Raises UserError if it is of another vocabulary."""
    ids = state.get("text", torch.zeros(0, dtype=torch.int64))
    if ids.dim() != 1 or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size):
        raise UserError(f"start: the saved text is not one of token ids below {vocab_size}")
    return SuffixAutomaton(ids.tolist())
