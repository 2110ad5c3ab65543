"""Text kept between prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...engine import Draft, Session, State, Verification, checked
from ...errors import UserError


class History:
    """The newest prompts and answers, to which a sequence appends its own.

    A sequence borrows the text until it closes. A concurrent sequence gets a copy of the earlier
    text, which becomes the history; the first one's tokens are appended later. Of a prompt that
    begins with the last sequence's text, only the rest is appended.

    Args:
        text_of: makes a text, with the index by which a method copies from it.
    """

    def __init__(
        self, history_tokens: int, text_of: Callable[[Iterable[int]], Any], vocab_size: int
    ) -> None:
        if type(history_tokens) is not int or history_tokens < 0 or history_tokens == 1:
            raise UserError(
                f"history_tokens={history_tokens}: must be 0 (the prompt's own text alone) or a"
                " number of tokens from 2"
            )

        self.history_tokens = history_tokens
        self.text_of = text_of
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        self.text = self.text_of(())
        # its tokens when it was borrowed; None: nobody borrows it
        self.borrowed_length: int | None = None
        # newest tokens of sequences whose text was replaced meanwhile; another list after a reset
        self.pending: list[int] = []
        self.last_length = 0  # tokens of the last sequence, at the text's end

    def borrow(self) -> Any:
        if self.history_tokens == 0:
            return self.text_of(())
        if self.borrowed_length is not None:  # its borrower may never close
            self.text = self.text_of(self.text.tokens[: self.borrowed_length])
        if self.pending:
            self.text.extend(self.pending)
            self.pending.clear()
            self.last_length = 0
        if len(self.text.tokens) > self.history_tokens:
            self.text = self.text_of(self.text.tokens[-(self.history_tokens // 2) :])

        self.borrowed_length = len(self.text.tokens)
        return self.text

    def state_dict(self) -> State:
        tokens = self.text.tokens + self.pending
        return {"text": torch.tensor(tokens, dtype=torch.int64)} if self.history_tokens else {}

    def read(self, state: State) -> list[int] | None:
        if "text" not in state:
            return None
        text: list[int] = checked(state, "text", (-1,), 0, self.vocab_size - 1).tolist()
        return text

    def load(self, text: list[int]) -> None:
        self.text.extend(text)


class TextSession(Session):
    drafter: Any  # its `history` holds the text that this sequence appends to
    text: Any = None  # before `begin` and after `close`

    def begin(self, prompt: list[int]) -> Draft | None:
        history = self.drafter.history
        self.text = history.borrow()
        self._pending = history.pending
        tokens = self.text.tokens
        shared = history.last_length
        if tokens[-shared:] != prompt[:shared]:
            shared = 0

        self._start = len(tokens) - shared
        self.text.extend(prompt[shared:])
        return super().begin(prompt)

    def account(self, verification: Verification) -> None:
        self.text.extend(verification.tokens)

    def skip(self, tokens: list[int]) -> None:
        self.text.extend(tokens)

    def close(self) -> None:
        if self.text is None:
            return
        history = self.drafter.history
        sequence = self.text.tokens[self._start :]
        if self.text is history.text:
            history.borrowed_length = None
            history.last_length = len(sequence)
        elif history.history_tokens:
            self._pending += sequence
            del self._pending[: -history.history_tokens]
        self.text = None
