"""Teacher forcing: what a model says at each place of a given answer, in one forward or token by token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from model.engine import Draft, Target, Tree


@dataclass
class Forced:
    """The model at each of the n places of an answer, and at the place behind it.

    Attributes:
        own: its arg-max (n + 1).
        gaps: by how much the answer's token is below it (n), and then the likeliest EOS: 0 if it is the greatest.
        margins: the greatest logit minus the second one (n + 1).
    """

    own: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def force(
    target: Target, prompt: list[int], ids: list[int], eos: Collection[int] = (), *, by_steps: bool = False
) -> Forced:
    """Read the model's logits along an answer; at most `LOGITS_BYTES` of them are held.

    Args:
        by_steps: forward a token at a time, as engines decode.
    """
    forced, ends = Forced(), sorted(eos)

    def read(start: int, logits: torch.Tensor) -> None:  # (m, V)
        first, logits = len(forced.own), logits.float()
        best = logits.topk(2).values  # (m, 2)
        said = torch.tensor([*ids, 0][first : first + len(logits)], device=logits.device)
        picked = logits.gather(1, said[:, None])[:, 0]
        if first + len(logits) > len(ids):
            picked[-1] = logits[-1, ends].max() if ends else float("-inf")
        forced.own.extend(logits.argmax(-1).tolist())
        forced.gaps.extend((best[:, 0] - picked).tolist())
        forced.margins.extend((best[:, 0] - best[:, 1]).tolist())

    text, root = [*prompt, *ids], Tree.chain(0).on(target.device)
    with target.turns, target.cache(1, tokens=len(text) + 1) as cache:
        if not by_steps:
            target.prefill(cache, [*text, 0], rows=len(ids) + 1, read=read)
            return forced
        target.prefill(cache, prompt)
        for token in text[len(prompt) - 1 :]:
            read(0, target.forward(cache, Draft(root, torch.tensor([token], device=target.device))).logits)
            cache.commit(1)
    return forced


def noise(one: Forced, other: Forced) -> float:
    """Return the most by which the two greatest logits of a place move against each other from one to the other."""
    pairs = zip(one.own, other.own, one.margins, other.margins, strict=True)
    return max(abs(a - b) if own == others else a + b for own, others, a, b in pairs)
