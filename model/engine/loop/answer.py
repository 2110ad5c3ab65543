"""A request, the sequence that is being decoded, and its answer with a record of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from ..attention.cache import TreeCache
from ..contract.drafter import Session
from ..rule.sampling import GREEDY, Ends, Sampling
from ..rule.tree import RankPath
from ..rule.verification import Verification
from ..target.target import Target

Mark = Callable[[str], None]


def unmarked(phase: str) -> None:
    """Do nothing: the default `mark`."""


@dataclass(slots=True)
class StepRecord:
    """What one step added to the output; every metric derives from these records."""

    # the accepted drafts and the target's own next token, cut at the answer's end
    tokens: list[int]
    nodes: int  # nodes forwarded, root included
    rank_path: RankPath  # ranks of the accepted nodes from the root down
    source: str | None = None  # where the draft came from, for a drafter with several sources
    batch: int = 1  # sequences in its forward

    @property
    def accepted(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Generation:
    """One answer. All other times exclude setup_s.

    In a batch, a step's seconds are divided equally among its sequences; `ends_s` is what each
    sequence waited.
    """

    tokens: list[int] = field(default_factory=list)  # new ones, EOS included if it came
    steps: list[StepRecord] = field(default_factory=list)
    # eos | length (max_new_tokens) | context (the model's or the setting's limit) | stop
    # (`Request.ends`)
    stop: str = ""
    forwards: int = 0  # forwards of the target: one per step, and the prompt's if separate
    prefill_s: float = 0.0  # until the first step's tokens are known
    decode_s: float = 0.0  # from then on
    # spent on static steps of a shape not met before, capturing included; 0 if eager
    setup_s: float = 0.0
    ends_s: list[float] = field(default_factory=list)  # until each step's tokens were known

    @property
    def accept_lengths(self) -> list[int]:
        return [step.accepted for step in self.steps]

    def end(
        self, limit: int, max_new_tokens: int, eos: Collection[int], ended: bool = False
    ) -> None:
        """Set `stop` if the last step ended the answer.

        Args:
            limit: what the context left of max_new_tokens.
        """
        if self.tokens[-1] in eos:
            self.stop = "eos"
        elif ended:
            self.stop = "stop"
        elif len(self.tokens) == limit:
            self.stop = "length" if limit == max_new_tokens else "context"


def acceptance_record(
    drafted: Collection[int], accepted: Collection[int], max_drafted: int
) -> dict[str, Any]:
    """Return an answer's acceptance as engines and benchmarks exchange it.

    It is `metrics.speculative_decoding` of vLLM's responses at the level `detailed` (vLLM PR
    48915). Steps without a draft are left out. A tree's draft tokens are all its nodes but the
    root.

    Args:
        drafted: (S,) draft tokens of each step.
        accepted: (S,) draft tokens of each step that the answer kept.
        max_drafted: maximum draft tokens of a step.
    """
    steps = [(draft, count) for draft, count in zip(drafted, accepted, strict=True) if draft]
    histogram = [0] * (max_drafted + 1)
    for _, count in steps:
        histogram[count] += 1
    proposed = sum(draft for draft, _ in steps)
    total = sum(count for _, count in steps)
    return {
        "mean_acceptance_length": 1 + total / len(steps) if steps else 1.0,
        "draft_acceptance_rate": total / proposed if steps else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": total,
        "num_draft_tokens": proposed,
        "num_spec_tokens": max_drafted,
        "per_step_accepted": [count for _, count in steps],
        "per_step_drafted": [draft for draft, _ in steps],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The settings of one answer.

    Attributes:
        eos: ids that end an answer (it is part of the output).
        execution: eager, static or graph; see `step`.
        mark: called with a phase's name when it ends: prefill, then for each step draft, forward,
            verify, commit, observe and loop; on the device setup, step and loop.
        reuse: keep what the last sequence committed of the prompt, if the drafter allows.
        ends: given prompt and answer: True if the answer ends there.
    """

    max_new_tokens: int
    eos: Collection[int] = ()
    sampling: Sampling = GREEDY
    execution: str = "eager"
    mark: Mark = unmarked
    reuse: bool = False
    ends: Ends | None = None


@dataclass(eq=False)
class Decoding:
    """A sequence that is being decoded.

    Attributes:
        text: the prompt and the answer so far, the root last.
        limit: new tokens at most: what the context leaves of `max_new_tokens`.
        number: in a batch, the index of its prompt.
    """

    target: Target
    cache: TreeCache
    session: Session
    request: Request
    text: list[int]
    limit: int
    number: int = 0
    out: Generation = field(default_factory=Generation)
    start: float = field(default_factory=time.perf_counter)
    ended: bool = False
    _checked_length: int = 0  # the length of the text last given to `Request.ends`

    def over(self, new: list[int]) -> bool:
        """True if the answer ends with the last of a step's new tokens."""
        request = self.request
        length = len(self.text) + len(new)
        if request.ends is not None and length > self._checked_length:
            self._checked_length = length
            self.ended = request.ends([*self.text, *new])
        stopped = self.ended and length == self._checked_length
        full = len(self.out.tokens) + len(new) == self.limit
        return stopped or full or new[-1] in request.eos

    def add(self, verification: Verification, batch: int = 1) -> None:
        """Add a step of a forward of so many sequences. Sets `out.stop` if the answer ends."""
        out = self.out
        request = self.request
        draft = verification.draft
        tokens = verification.tokens
        path = draft.tree.rank_path(verification.node)[: len(tokens)]
        out.tokens += tokens
        out.forwards += 1
        out.steps.append(StepRecord(tokens, len(draft.tree), path, draft.source, batch))
        out.end(self.limit, request.max_new_tokens, request.eos, self.ended)
        out.ends_s.append(time.perf_counter() - self.start)
        self.text += tokens
