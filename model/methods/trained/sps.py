"""Speculative decoding: a small model drafts the next tokens one by one (arXiv 2211.17192).

Tokens and target forwards equal those of transformers' assisted generation with a constant schedule
and no confidence threshold.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...engine import Draft, Drafter, Session, Target, Tree, Verification
from ...engine.attention.checks import position_limit
from ...errors import UserError
from ...files import located
from ...pretrained import load_pretrained
from ..limits import PADDING, check_whole

EXCLUDED = 1e5  # subtracted from logits to rank them after all others


class Speculative(Drafter):
    """Drafts a chain with a second model on a cache of its own; a draft stops before EOS."""

    def __init__(
        self,
        *,
        target: Target,
        draft_path: str,
        draft_tokens: int = 4,
        eos: Collection[int] = (),
        share_noise: bool = True,
    ) -> None:
        check_whole("sps", 1, draft_tokens=draft_tokens)
        super().__init__(target.device, target.vocab_size)
        called = f"sps: draft model {draft_path}"
        folder = located(draft_path)
        if not folder.is_dir():
            raise UserError(f"{called}: no such folder")

        model, _ = load_pretrained(
            str(folder),
            dtype=target.dtype,
            device=target.device,
            called=called,
            with_tokenizer=False,
            attn_implementation="sdpa",
        )
        limit = position_limit(model) or target.context
        self.model = Target(model, context=min(target.context, limit), linear=target.linear)
        if abs(self.model.vocab_size - target.vocab_size) >= PADDING:
            raise UserError(
                f"{called}: has a vocabulary of {self.model.vocab_size} tokens, the target of"
                f" {target.vocab_size}; the two must share one tokenizer"
            )
        if self.model.recurrent:
            raise UserError(f"{called}: keeps recurrent states, which cannot take back its drafts")

        self.draft_tokens = draft_tokens
        self.eos = frozenset(eos)
        self.share_noise = share_noise
        self.max_nodes = 1 + draft_tokens
        self.logits_size = target.logits_size

    def session(self) -> SpeculativeSession:
        return SpeculativeSession(self)


class SpeculativeSession(Session):
    drafter: Speculative

    def __init__(self, drafter: Speculative) -> None:
        super().__init__(drafter)
        self._text: list[int] = []  # prompt and output, the root last
        self._borrowed = ExitStack()

    def begin(self, prompt: list[int]) -> Draft:
        model = self.drafter.model
        self.cache = self._borrowed.enter_context(model.cache(self.drafter.max_nodes))
        self._text = list(prompt)
        if len(prompt) >= model.context:
            return self.drafter.root_alone(prompt[-1])
        ids = [min(token, model.vocab_size - 1) for token in prompt]
        outputs = model.prefill(self.cache, ids, self.drafter.root_alone(ids[-1]))
        self.cache.commit([0])
        return self._propose(outputs.logits)

    def draft(self, root: int) -> Draft:
        model = self.drafter.model
        if len(self._text) >= model.context:
            return self.drafter.root_alone(root)
        # The root, and after a fully accepted draft also its last token, which was drafted but
        # never forwarded.
        unseen = self._text[self.cache.length :]
        chain = Tree.chain(len(unseen) - 1).on(model.device)
        tokens = torch.tensor(unseen, device=model.device).clamp_(max=model.vocab_size - 1)
        logits = model.forward(self.cache, Draft(chain, tokens)).logits  # (1 or 2, V)
        self.cache.commit(range(len(unseen)))
        return self._propose(logits[-1:])

    def observe(self, verification: Verification) -> None:
        self._text += verification.tokens
        # Rejected drafts leave the cache; its next forward writes over them.
        self.cache.length = min(self.cache.length, len(self._text) - 1)

    def close(self) -> None:
        self._borrowed.close()

    def _propose(self, logits: Tensor) -> Draft:
        drafter = self.drafter
        root = Tree.chain(0).on(drafter.device)
        drafts = [self._pick(logits, len(self._text))]  # (1,) each
        while len(drafts) < drafter.draft_tokens:
            logits = drafter.model.forward(self.cache, Draft(root, drafts[-1])).logits
            drafts.append(self._pick(logits, len(self._text) + len(drafts)))
            self.cache.commit([0])

        tokens = list(takewhile(lambda token: token not in drafter.eos, torch.cat(drafts).tolist()))
        tree = Tree.chain(len(tokens)).on(drafter.device)
        return Draft(tree, torch.tensor([self._text[-1], *tokens], device=drafter.device))

    def _pick(self, logits: Tensor, position: int) -> Tensor:
        """Return the draft token (1,) for a position of the text.

        By the target's noise for that position, two models of one distribution draw the same token
        (Daliri et al., arXiv 2408.07978).
        """
        # to the target's width
        logits = pad(logits, (0, self.drafter.logits_size - logits.shape[1]), value=-torch.inf)
        if self.drafter.share_noise and self.choice.draws:
            scores = self.choice.scores(logits, torch.tensor([position], device=logits.device))
            # tokens that top-k or top-p leaves out come last
            logits = torch.where(scores.isneginf(), logits.float() - EXCLUDED, scores)
        return logits.argmax(dim=-1)
