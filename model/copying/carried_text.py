"""Text that is carried from prompt to prompt, so that what an earlier answer said can be copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..decoding import Draft, Drafter, Session, Verification
from ..errors import UserError


class Text(Protocol):
    """Tokens, and what a method keeps of them to copy by."""

    tokens: list[int]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""


T = TypeVar("T", bound=Text)


class Carried(Generic[T]):
    """The newest prompts and answers, in which sequences read on.

    A sequence borrows the text until it closes. One that begins meanwhile has a text of its own, behind what was known
    before; what it says is added when the text is next begun.

    Args:
        history_tokens: at most so many tokens of earlier prompts and answers; 0: none. More than that is cut to the
            newest half, so that a cut is rare: it reads that half again. A token takes some 440 bytes, so 32768 of them
            14 MB; where drafting is compiled 120 to 270.

    Raises:
        UserError: `history_tokens` is no such number.
    """

    def __init__(self, history_tokens: int, text_of: Callable[[Iterable[int]], T]) -> None:
        if (
            not isinstance(history_tokens, int)
            or isinstance(history_tokens, bool)
            or history_tokens < 0
            or history_tokens == 1
        ):
            raise UserError(
                f"history_tokens={history_tokens}: must be 0 (the prompt's own text alone) or a number of tokens from 2"
            )
        self.history_tokens, self.text_of = history_tokens, text_of
        self.reset()

    def reset(self) -> None:
        """Nothing is known."""
        self.text = self.text_of(())
        self.lent: int | None = None  # tokens that were there when the text was borrowed; None: nobody has it
        self.late: list[int] = []  # what was said in other texts meanwhile, the newest of it
        self.forgotten = object()  # tells whoever read before a reset from whoever reads after it

    def borrow(self) -> T:
        """The text for a sequence."""
        if self.history_tokens == 0:
            return self.text_of(())
        if self.lent is not None:
            return self.text_of(self.text.tokens[: self.lent])
        self.text.extend(self.late)
        if len(self.text.tokens) > self.history_tokens:
            self.text = self.text_of(self.text.tokens[-(self.history_tokens // 2) :])
        self.late, self.lent = [], len(self.text.tokens)
        return self.text

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`text`, int64 (n,); empty where nothing is carried."""
        tokens = self.text.tokens + self.late
        return {"text": torch.tensor(tokens, dtype=torch.int64)} if self.history_tokens else {}

    def load_state_dict(self, state: dict[str, torch.Tensor], vocab_size: int) -> None:
        """Go on from a saved text, from none where there is none. Raises UserError if it is of another vocabulary."""
        ids = state.get("text", torch.zeros(0, dtype=torch.int64))
        if ids.dim() != 1 or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size):
            raise UserError(f"start: the saved text is not one of token ids below {vocab_size}")
        self.reset()
        self.text.extend(ids.tolist())


class TextSession(Session, Generic[T]):
    """A sequence's text: what is carried, its prompt, its answer so far."""

    method: Any  # whose `carried` text it reads on in
    text: T

    def __init__(self, method: Drafter) -> None:
        super().__init__(method)
        self._end()

    def begin(self, prompt: list[int]) -> Draft | None:
        carried = self.method.carried
        self.text, self._era = carried.borrow(), carried.forgotten
        self._from = len(self.text.tokens)
        self.text.extend(prompt)
        return super().begin(prompt)

    def read(self, tokens: list[int]) -> None:
        """The text goes on."""
        self.text.extend(tokens)

    def account(self, verification: Verification) -> None:
        """After a step on the device."""
        self.read(verification.tokens)

    def passed(self, tokens: list[int]) -> None:
        self.read(tokens)

    def close(self) -> None:
        carried = self.method.carried
        if self.text is carried.text:
            carried.lent = None
        elif carried.history_tokens and self._era is carried.forgotten:
            carried.late = (carried.late + self.text.tokens[self._from :])[-carried.history_tokens :]
        self._end()

    def _end(self) -> None:
        """No text: closing once more does nothing."""
        self.text, self._from, self._era = self.method.carried.text_of(()), 0, None
