"""SAM-Decoding with EAGLE-2: a long match is copied (arXiv 2411.10666, 3.4).

As Spec-Bench runs it, without its static automaton. There, pairs that the head has not read by a
request's end are left to the next request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine import Draft, Drafter, Session, Target, Tree, Verification
from ..copying.suffix_automaton import SuffixAutomaton
from ..limits import check_whole
from .eagle import Eagle2


class Samd(Drafter):
    """A chain copied from the sequence's own text where the match is long, else EAGLE-2's tree."""

    def __init__(
        self,
        target: Target,
        *,
        head_path: str,
        min_match: int = 5,
        max_draft: int = 39,
        depth: int = 6,
        top_k: int = 8,
        nodes: int = 62,
    ) -> None:
        check_whole("samd", 1, min_match=min_match, max_draft=max_draft)
        super().__init__(target.device, target.vocab_size)
        self.min_match = min_match
        self.chain = Tree.chain(max_draft).on(self.device)
        self.partner = Eagle2(target, head_path=head_path, depth=depth, top_k=top_k, nodes=nodes)
        self.needs = self.partner.needs
        self.max_nodes = max(len(self.chain), self.partner.max_nodes)

    def session(self) -> SamdSession:
        return SamdSession(self)


class SamdSession(Session):
    drafter: Samd

    def __init__(self, drafter: Samd) -> None:
        super().__init__(drafter)
        self.text = SuffixAutomaton()
        self.partner = drafter.partner.session()

    def begin(self, prompt: list[int]) -> Draft | None:
        self.text.extend(prompt)
        return self.partner.begin(prompt)

    def observe_prompt_hidden(self, prompt: list[int], hidden: Tensor) -> None:
        self.partner.observe_prompt_hidden(prompt, hidden)

    def draft(self, root: int) -> Draft:
        chain = self.drafter.chain
        if self.text.length >= self.drafter.min_match:
            tokens = [root, *self.text.copy_first(chain.max_depth)]
            return Draft(chain, torch.tensor(tokens, device=self.drafter.device), "suffix")
        draft = self.partner.draft(root)
        return Draft(draft.tree, draft.tokens, "eagle2")

    def observe(self, verification: Verification) -> None:
        self.partner.observe(verification)
        self.text.extend(verification.tokens)

    def close(self) -> None:
        self.partner.close()
