"""One answer: its request, the sequence that is being decoded, its raw datum: the step record."""

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
    """Do nothing: the default `mark`, without timing of phases."""


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
        """The accepted length."""
        return len(self.tokens)


@dataclass(slots=True)
class Generation:
    """One answer. All other times exclude setup_s.

    In a batch, a step's seconds are divided equally among its sequences, so that sums over answers
    are the whole's; `ends_s` is what each sequence waited.
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
            ended: True if `Request.ends` was True.
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
    """Return an answer's acceptance as engines and benchmarks exchange it; steps without a draft
    are left out.

    It is `metrics.speculative_decoding` of vLLM's responses at the level `detailed` (vLLM PR 48915,
    merged), which AIPerf reads since its PR 1191. The later `acceptance_histogram_by_draft_length`
    (vLLM PR 56278) is left out.

    A tree's draft tokens are all its nodes but the root, so that `draft_acceptance_rate` falls with
    its breadth.

    Args:
        drafted: (S,) draft tokens of each step.
        accepted: (S,) draft tokens of each step that the answer kept; of a step cut at the end,
            those before the cut.
        max_drafted: maximum draft tokens of a step; the histogram has one bin more.
    """
    steps = [(draft, kept) for draft, kept in zip(drafted, accepted, strict=True) if draft]
    histogram = [0] * (max_drafted + 1)
    for _, kept in steps:
        histogram[kept] += 1
    proposed = sum(draft for draft, _ in steps)
    kept_in_all = sum(kept for _, kept in steps)
    return {
        "mean_acceptance_length": 1 + kept_in_all / len(steps) if steps else 1.0,
        "draft_acceptance_rate": kept_in_all / proposed if steps else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": kept_in_all,
        "num_draft_tokens": proposed,
        "num_spec_tokens": max_drafted,
        "per_step_accepted": [kept for _, kept in steps],
        "per_step_drafted": [draft for draft, _ in steps],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The settings of one answer.

    Attributes:
        max_new_tokens: maximum number of new tokens.
        eos: ids that end an answer (it is part of the output).
        sampling: how the next token is drawn; the target's choices are the same whatever is
            drafted.
        execution: how steps are executed: eager, static or graph; see `step`.
        mark: called with a phase's name when it ends: prefill, then for each step draft, forward,
            verify, commit, observe and loop; on the device setup (when a static step is made), step
            and loop.
        reuse: do not forward again what the last sequence committed of the prompt's beginning (a
            conversation's earlier turns), unless the drafter needs outputs of that forward and did
            not keep them.
        ends: asked after each token, given prompt and answer so far: True if the answer ends there
            (stop strings).
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
        ended: True once `Request.ends` was True.
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
    _asked: int = 0  # the length of the text last given to `Request.ends`

    def over(self, new: list[int]) -> bool:
        """True if the answer ends with the last of a step's new tokens."""
        request = self.request
        length = len(self.text) + len(new)
        if request.ends is not None and length > self._asked:
            self._asked = length
            self.ended = request.ends([*self.text, *new])
        stopped = self.ended and length == self._asked
        full = len(self.out.tokens) + len(new) == self.limit
        return stopped or full or new[-1] in request.eos

    def add(self, verification: Verification, batch: int = 1) -> None:
        """Add a step, cut at the answer's end and forwarded with so many sequences. `out.stop` is
        set if the answer ends.
        """
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
