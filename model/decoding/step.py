"""One decoding step, in three forms with the same outcome.

Eager; static, for drafters that work on the device: root, length and draft stay there, and one small tensor is read
back; and fed, for all other drafters: a draft of any tree goes through a forward of fixed shape.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass

import torch

from ..errors import UserError
from .cache import TreeCache
from .drafter import DeviceSession, Session
from .sampling import GREEDY, Choice, Sampling
from .selection import Found, candidates_of
from .static_step import Mark, StaticStep, StaticSteps
from .target import Target
from .tree import Draft
from .verification import Verification, told, verify


def unmarked(phase: str) -> None:
    """The default `mark`: nobody is timing phases."""


@dataclass
class Sequence:
    """A sequence that is being decoded.

    Attributes:
        text: the prompt and what was put out, the root last.
        end: tokens of prompt and answer together, at most.
        eos: ids that end an answer.
    """

    target: Target
    cache: TreeCache
    session: Session
    text: list[int]
    sampling: Sampling = GREEDY
    mark: Mark = unmarked
    end: int = sys.maxsize
    eos: Collection[int] = ()


def conclude(
    of: Sequence, draft: Draft, logits: torch.Tensor, choices: torch.Tensor, found: Found | None = None
) -> Verification:
    """Verify, commit, observe: what follows a forward over a draft of n nodes. What is put out ends with the answer.

    Args:
        logits: (n, V).
        choices: what the target picks by them, int64 (n,).
        found: what the method needs of the logits, where it is known already.
    """
    verification = verify(draft, choices)
    of.mark("verify")
    tree, node = draft.tree, verification.node
    of.cache.commit(tree.depth_of[node] + 1, None if tree.is_chain else tree.below(node))
    of.mark("commit")
    method = of.session.method
    if method.needs_logits:
        verification.logits = logits
    found = found or candidates_of(logits, method.needs_candidates, method.needs_bits)
    verification.candidates, verification.bits = found
    hidden = of.target.hidden
    if hidden is not None:  # behind a prompt's own, if it was forwarded with the prompt
        verification.hidden = hidden[-len(tree) :]
    verification.cut(of.end - len(of.text), of.eos)
    of.session.observe(verification)
    of.mark("observe")
    return verification


def chosen(of: Sequence, choice: Choice, draft: Draft, logits: torch.Tensor) -> torch.Tensor:
    """What the target picks after each node, as far as the method needs it: int64 (n,)."""
    return choice.after(logits, draft, of.text, every=of.session.method.needs_choices)


class EagerStep:
    """Draft, forward, verify, commit, observe: whatever the session drafts."""

    def __init__(self, of: Sequence) -> None:
        self.of, self.choice = of, Choice(of.sampling, of.target.device)

    @property
    def setup_s(self) -> float:
        """Nothing is made for a tree."""
        return 0.0

    def __call__(self) -> Verification:
        of = self.of
        draft = of.session.draft(of.text[-1])
        of.mark("draft")
        logits = of.target.forward(of.cache, draft)
        of.mark("forward")
        return conclude(of, draft, logits, chosen(of, self.choice, draft, logits))


class StaticSequence:
    """One sequence by static steps, for a session of the kind whose step runs on the device."""

    def __init__(self, of: Sequence) -> None:
        assert isinstance(of.session, DeviceSession)
        self.of, self.session = of, of.session
        self.steps = StaticSteps.of(of.target, of.cache, of.session.method, of.sampling)
        self.choice = self.steps.choice
        self.choice.take(of.sampling.seed)
        self._now: StaticStep | None = None  # the step that holds root and length: until then they are the host's

    @property
    def setup_s(self) -> float:
        return self.steps.setup_s

    def __call__(self) -> Verification:
        self.session.choose()
        method, cache = self.session.method, self.of.cache
        step, launch = self.steps.whole(cache, method, self.of.mark)
        if step is not self._now:
            step.root.fill_(self.of.text[-1])
            step.length.fill_(cache.length)
            self._now = step
        self.choice.take(self.of.sampling.seed)  # sequences of other seeds may take turns with this one
        launch()
        verification = told(
            Draft(step.tree, step.tokens, method.source), step.choices, step.settlement.stands, step.settlement.read()
        )
        self.of.mark("step")
        cache.length += step.tree.depth_of[verification.node] + 1
        verification.cut(self.of.end - len(self.of.text), self.of.eos)
        self.session.account(verification)
        return verification


class FedSequence:
    """One sequence whose drafts are fed into static steps, for a session that drafts as it likes."""

    def __init__(self, of: Sequence) -> None:
        self.of = of
        self.steps = StaticSteps.of(of.target, of.cache, of.session.method, of.sampling)
        self.choice = self.steps.choice
        self.choice.take(of.sampling.seed)

    @property
    def setup_s(self) -> float:
        return self.steps.setup_s

    def __call__(self) -> Verification:
        of = self.of
        self.choice.take(of.sampling.seed)
        draft = of.session.draft(of.text[-1])
        of.mark("draft")
        n = len(draft.tree)
        step, launch = self.steps.fed(of.cache, n, of.session.method, of.mark)
        step.feed(draft, of.cache.length)
        launch()
        if step.hidden is not None:  # what a replay wrote, no hook has seen
            of.target.hidden = step.hidden[:n]
        choices, found = step.read(n) if draft.tree.device.type == "cpu" else (step.choices[:n], step.found(n))
        of.mark("forward")
        return conclude(of, draft, step.logits[:n], choices, found)


AnyStep = EagerStep | StaticSequence | FedSequence


def make_step(of: Sequence) -> AnyStep:
    """The form of step that the target's execution and the session's kind ask for.

    Raises:
        UserError: what is sampled reads the text, and steps are to be of fixed shape.
    """
    if of.target.execution == "eager":
        return EagerStep(of)
    if of.sampling.reads_text:
        raise UserError(
            f"sampling: a repetition penalty and other processors that read the text take execution=eager, "
            f"not {of.target.execution}"
        )
    return StaticSequence(of) if isinstance(of.session, DeviceSession) else FedSequence(of)
