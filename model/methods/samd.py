"""SAM-Decoding with EAGLE-2 (arXiv 2411.10666, 3.4).

A long match is copied, elsewhere EAGLE-2 drafts.

As Spec-Bench runs it (github.com/hemingkx/Spec-Bench, model/samd), without its static automaton.
There, pairs that the head has not read by the end of a request are left to the next request, which
then drafts from another text's pairs; here each sequence has its own pairs.
"""

from __future__ import annotations

from ..engine import Draft, Drafter, Target, Verification
from .eagle import Eagle2
from .suffix import HybridSession, Suffix, SuffixSession


class FirstSuffix(Suffix):
    """Copies as the public code does.

    Always `max_draft` tokens, from the match's first occurrence.
    """

    def session(self) -> FirstSuffixSession:
        return FirstSuffixSession(self)


class FirstSuffixSession(SuffixSession):
    def copied(self, count: int) -> list[int]:
        return self.text.copy_first(count)


class Samd(Drafter):
    """A chain copied from the sequence's own text where the match is long.

    Elsewhere, EAGLE-2's tree.

    The head does not run in copied steps; it reads what they added before its next tree. Nothing is
    kept between prompts. In step records the source is `suffix` or `eagle2`.

    Args:
        min_match: least tokens of a match that is copied from, the root included.
        max_draft: number of tokens to copy; if the text has fewer, id 0 follows.
        others: as Eagle2.
    """

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
        super().__init__(target.device, target.vocab_size)
        self.suffix = FirstSuffix(
            target.vocab_size,
            min_match=min_match,
            max_draft=max_draft,
            factor=max_draft,
            device=target.device,
        )
        self.partner = Eagle2(target, head_path=head_path, depth=depth, top_k=top_k, nodes=nodes)
        self.needs = self.partner.needs
        self.max_nodes = max(self.suffix.max_nodes, self.partner.max_nodes)

    def session(self) -> SamdSession:
        return SamdSession(self)


class SamdSession(HybridSession):
    drafter: Samd

    def draft(self, root: int) -> Draft:
        draft = self.suffix.draft(root)
        source = "suffix"
        if draft.tree.max_depth == 0:
            draft = self.partner.draft(root)
            source = "eagle2"
        return Draft(draft.tree, draft.tokens, source)

    def observe(self, verification: Verification) -> None:
        self.partner.observe(verification)
        self.suffix.account(verification)
