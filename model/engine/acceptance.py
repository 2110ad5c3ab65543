"""The acceptance record of an answer that engines and benchmarks exchange, field for field.

It is `metrics.speculative_decoding` of vLLM's responses at the level `detailed` (vLLM PR 48915, merged), which AIPerf
reads since its PR 1191. The later `acceptance_histogram_by_draft_length` (vLLM PR 56278) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def acceptance_record(drafted: Sequence[int], accepted: Sequence[int], most: int) -> dict[str, Any]:
    """Return the record of an answer of S steps; those without a draft are left out, as vLLM does.

    A tree's draft tokens are all its nodes but the root, so that `draft_acceptance_rate` falls with its breadth.

    Args:
        drafted: (S,) draft tokens of each step.
        accepted: (S,) those of them that the answer kept; one cut at its end counts as what was kept.
        most: the draft tokens that a step may have; the histogram has one place more.
    """
    steps = [(draft, kept) for draft, kept in zip(drafted, accepted, strict=True) if draft]
    histogram = [0] * (most + 1)
    for _, kept in steps:
        histogram[kept] += 1
    proposed, taken = sum(draft for draft, _ in steps), sum(kept for _, kept in steps)
    return {
        "mean_acceptance_length": 1 + taken / len(steps) if steps else 1.0,
        "draft_acceptance_rate": taken / proposed if steps else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": taken,
        "num_draft_tokens": proposed,
        "num_spec_tokens": most,
        "per_step_accepted": [kept for _, kept in steps],
        "per_step_drafted": [draft for draft, _ in steps],
    }
