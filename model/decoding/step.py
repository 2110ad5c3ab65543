"""One decoding step, in three forms with the same outcome.

Eager; static, for drafters that work on the device: root, length and draft stay there, and one small tensor is read
back; and fed, for all other drafters: a draft of any tree goes through a forward of fixed shape.
"""

from __future__ import annotations

import torch

from .cache import TreeCache
from .drafter import DeviceSession, Session
from .selection import argmax
from .static_step import Mark, StaticStep, StaticSteps
from .target import Target
from .tree import Draft
from .verification import Verification, told, verify


def unmarked(phase: str) -> None:
    """The default `mark`: nobody is timing phases."""


def conclude(
    target: Target,
    cache: TreeCache,
    session: Session,
    draft: Draft,
    logits: torch.Tensor,
    mark: Mark = unmarked,
    *,
    choices: torch.Tensor | None = None,
) -> Verification:
    """Verify, commit, observe: what follows a forward over a draft of n nodes, whose logits (n, V) these are.

    Args:
        choices: their arg-max, int64 (n,), where it is known.
    """
    verification = verify(draft, argmax(logits) if choices is None else choices)
    mark("verify")
    tree, node = draft.tree, verification.node
    cache.commit(tree.depth_of[node] + 1, None if tree.is_chain else tree.below(node))
    mark("commit")
    if session.method.needs_logits:
        verification.logits = logits
    if target.hidden is not None:  # behind a prompt's own, if it was forwarded with the prompt
        verification.hidden = target.hidden[-len(tree) :]
    session.observe(verification)
    mark("observe")
    return verification


class EagerStep:
    """Draft, forward, verify, commit, observe: whatever the session drafts."""

    setup_s = 0.0  # nothing is made for a tree

    def __init__(self, target: Target, cache: TreeCache, session: Session, mark: Mark) -> None:
        self.target, self.cache, self.session, self.mark = target, cache, session, mark

    def __call__(self, root: int) -> Verification:
        draft = self.session.draft(root)
        self.mark("draft")
        logits = self.target.forward(self.cache, draft)
        self.mark("forward")
        return conclude(self.target, self.cache, self.session, draft, logits, self.mark)


class StaticSequence:
    """One sequence by static steps, for a session of the kind whose step runs on the device."""

    def __init__(self, target: Target, cache: TreeCache, session: DeviceSession, mark: Mark) -> None:
        self.cache, self.session, self.mark = cache, session, mark
        self.steps = StaticSteps.of(target, cache, session.method)
        self._now: StaticStep | None = None  # the step that holds root and length: until then they are the host's

    @property
    def setup_s(self) -> float:
        return self.steps.setup_s

    def __call__(self, root: int) -> Verification:
        self.session.choose()
        method, cache = self.session.method, self.cache
        step, launch = self.steps.whole(cache, method, self.mark)
        if step is not self._now:
            step.root.fill_(root)
            step.length.fill_(cache.length)
            self._now = step
        launch()
        verification = told(Draft(step.tree, step.tokens, method.source), step.choices, step.stands, step.report)
        self.mark("step")
        cache.length += step.tree.depth_of[verification.node] + 1
        self.session.account(verification)
        return verification


class FedSequence:
    """One sequence whose drafts are fed into static steps, for a session that drafts as it likes."""

    def __init__(self, target: Target, cache: TreeCache, session: Session, mark: Mark) -> None:
        self.target, self.cache, self.session, self.mark = target, cache, session, mark
        self.steps = StaticSteps.of(target, cache, session.method)

    @property
    def setup_s(self) -> float:
        return self.steps.setup_s

    def __call__(self, root: int) -> Verification:
        draft = self.session.draft(root)
        self.mark("draft")
        n = len(draft.tree)
        step, launch = self.steps.fed(self.cache, n, self.session.method.max_nodes, self.mark)
        step.feed(draft, self.cache.length)
        launch()
        if step.hidden is not None:  # what a replay wrote, no hook has seen
            self.target.hidden = step.hidden[:n]
        self.mark("forward")
        logits, choices = step.logits[:n], step.choices[:n]
        return conclude(self.target, self.cache, self.session, draft, logits, self.mark, choices=choices)


AnyStep = EagerStep | StaticSequence | FedSequence


def make_step(target: Target, cache: TreeCache, session: Session, mark: Mark) -> AnyStep:
    """The form of step that the target's execution and the session's kind ask for."""
    if target.execution == "eager":
        return EagerStep(target, cache, session, mark)
    if isinstance(session, DeviceSession):
        return StaticSequence(target, cache, session, mark)
    return FedSequence(target, cache, session, mark)
