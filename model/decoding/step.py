"""One decoding step, of two kinds with the same outcome, and what executes them.

A `HostStep` is drafted on the host, which also verifies and commits. A `DeviceStep` is drafted on the device: root,
length and draft stay there, and one small tensor is read back. The `Executor` alone decides between eager, static,
compiled and captured.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..errors import UserError
from .cache import TreeCache
from .devices import compiling, free_bytes
from .drafter import DeviceDrafter, DeviceSession, Drafter, Session
from .sampling import GREEDY, Candidates, Choice, Sampling, candidates_of
from .static_step import ROWS, PaddedForward, Repeatable, Setup, WholeStep, bucket_of
from .target import Target
from .tree import Draft
from .verification import Verification, verify

# Static steps kept for a drafter on a cache; the one used longest ago goes first. All sizes of tree=auto over all
# buckets of 4,096 tokens are fewer: else each would be captured anew whenever it comes up.
MOST_STEPS = 192
LEAST_FREE = 1 << 30  # bytes of a GPU below which steps go before others are made,
MOST_DROPPED = 4  # so many at once at most: what else takes the memory, more of them would not give back
Mark = Callable[[str], None]
Made = TypeVar("Made", bound=Repeatable)


def unmarked(phase: str) -> None:
    """The default `mark`: nobody is timing phases."""


@dataclass(slots=True)
class Forwarded:
    """What a forward over a draft of n nodes gave.

    Attributes:
        choices: int64 (n,), what the target picks after each node, as far as the method needs it.
        logits: (n, V); None where the method needs nothing of them.
        hidden: (m, H), of the n nodes, behind a prompt's own where it was forwarded with them; None if not kept.
        candidates: what the method needs of the logits, where it is known already.
    """

    choices: torch.Tensor
    logits: torch.Tensor | None
    hidden: torch.Tensor | None
    candidates: Candidates | None = None


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

    @property
    def room(self) -> int:
        """Tokens that the answer may still have."""
        return self.end - len(self.text)


def conclude(
    session: Session,
    draft: Draft,
    forwarded: Forwarded,
    *,
    room: int,
    eos: Collection[int],
    cache: TreeCache | None = None,
    mark: Mark = unmarked,
) -> Verification:
    """Verify, commit, observe: what follows a forward over a draft of n nodes. What is put out ends with the answer.

    Args:
        room, eos: as `Verification.cut` takes them.
        cache: where the accepted nodes are committed; None: that is the caller's.
    """
    verification = verify(draft, forwarded.choices)
    mark("verify")
    tree, node = draft.tree, verification.node
    if cache is not None:
        cache.commit(tree.depth_of[node] + 1, None if tree.is_chain else tree.below(node))
    mark("commit")
    needs, logits = session.method.needs, forwarded.logits
    if needs.logits:
        verification.logits = logits
    if needs.candidates:
        assert logits is not None
        known = forwarded.candidates or candidates_of(logits, needs.candidates, needs.bits)
        verification.candidates, verification.bits = known
    if forwarded.hidden is not None:
        verification.hidden = forwarded.hidden[-len(tree) :]
    verification.cut(room, eos)
    session.observe(verification)
    mark("observe")
    return verification


def rests(session: Session) -> bool:
    """Is the next step a plain one, by what finds the size of the method's drafts?"""
    return session.method.sizing is not None and session.method.sizing.rests()


class HostStep:
    """Draft, forward, verify, commit, observe: whatever the session drafts."""

    def __init__(self, sequence: Sequence, executor: Executor) -> None:
        self.sequence, self.executor = sequence, executor
        self._plain = executor.idle.session()

    def __call__(self) -> Verification:
        sequence, plain = self.sequence, rests(self.sequence.session)
        session = self._plain if plain else sequence.session
        self.executor.choice.take(sequence.sampling.seed)  # sequences of other seeds may take turns with this one
        draft = session.draft(sequence.text[-1])
        sequence.mark("draft")
        forwarded = self.executor.forward(sequence, draft, session.method)
        room, eos = sequence.room, sequence.eos
        verification = conclude(session, draft, forwarded, room=room, eos=eos, cache=sequence.cache, mark=sequence.mark)
        if plain:
            sequence.session.passed(verification.tokens)
        return verification


class DeviceStep:
    """The same for a session whose step runs on the device."""

    def __init__(self, sequence: Sequence, executor: Executor) -> None:
        assert isinstance(sequence.session, DeviceSession)
        self.sequence, self.session, self.executor = sequence, sequence.session, executor
        self._last: WholeStep | None = None  # it holds root and length: until there is one they are the host's

    def __call__(self) -> Verification:
        sequence, plain = self.sequence, rests(self.session)
        method = self.executor.idle if plain else self.session.method
        if not plain:
            self.session.choose()
        step, launch = self.executor.whole(sequence.cache, method, sequence.mark)
        if step is not self._last:
            step.root.fill_(sequence.text[-1])
            step.length.fill_(sequence.cache.length)
            self._last = step
        self.executor.choice.take(sequence.sampling.seed)  # as above
        launch()
        draft = Draft(step.tree, step.tokens, method.source)
        verification = Verification.of_report(draft, step.choices, step.commit.accepted, step.commit.read())
        sequence.mark("step")
        sequence.cache.length += step.tree.depth_of[verification.node] + 1
        verification.cut(sequence.room, sequence.eos)
        if plain:
            self.session.passed(verification.tokens)
        else:
            self.session.account(verification)
        return verification


def make_step(sequence: Sequence) -> HostStep | DeviceStep:
    """The kind of step that the target's execution and the session's kind ask for.

    Raises:
        UserError: what is sampled reads the text, and steps are to be of fixed shape.
    """
    executor = Executor.of(sequence.target, sequence.cache, sequence.session.method, sequence.sampling)
    on_device = executor.execution != "eager" and isinstance(sequence.session, DeviceSession)
    return DeviceStep(sequence, executor) if on_device else HostStep(sequence, executor)


def execution_for(target: Target, sampling: Sampling) -> str:
    """The target's execution, or eager where that was its own choice and sampling reads the text."""
    return "eager" if sampling.reads_text and target.eager_where_needed else target.execution


class Executor:
    """What executes a drafter's steps on one cache; those of fixed shape are made when first needed, and kept.

    The target's execution says how: eager (the model as it is called), static (of fixed shape), graph (captured as one
    CUDA graph and replayed), compiled (the model's forward by torch.compile; on CUDA the step is captured, too, as its
    host work would hide what that gains).

    Attributes:
        choice: the target's rule, for whatever sequence takes its turn.
        idle: drafts and learns nothing; plain steps of a method that rests are its.
        setup_s: seconds spent on making steps so far, compiling and capturing included. They are not decoding: a shape
            is paid for by whichever prompt comes first, and again only behind MOST_STEPS others.

    Raises:
        UserError: what is sampled reads the text, and steps are to be of fixed shape.
    """

    def __init__(self, target: Target, sampling: Sampling = GREEDY) -> None:
        self.target, self.execution = target, execution_for(target, sampling)
        if sampling.reads_text and self.execution != "eager":
            raise UserError(
                f"sampling: a repetition penalty and other processors that read the text take execution=eager, "
                f"not {self.execution}"
            )
        self.choice = Choice(sampling, target.device)
        self.idle = DeviceDrafter(target.device)
        self.setup_s = 0.0
        self._made: OrderedDict[Hashable, tuple[Any, Callable[[], None]]] = OrderedDict()

    @staticmethod
    def of(target: Target, cache: TreeCache, drafter: Drafter, sampling: Sampling = GREEDY) -> Executor:
        """The one that there is for this cache, which is the target's, its execution and this sampling; or a new one.

        An eager one has made nothing that would be worth keeping.
        """
        execution = execution_for(target, sampling)
        if execution == "eager":
            return Executor(target, sampling)
        executor = drafter.executors.get(cache)
        if (
            executor is None
            or executor.execution != execution
            or replace(executor.choice.sampling, seed=0) != replace(sampling, seed=0)
        ):
            executor = drafter.executors[cache] = Executor(target, sampling)
        executor.choice.take(sampling.seed)
        return executor

    def chosen(self, sequence: Sequence, draft: Draft, logits: torch.Tensor, drafter: Drafter) -> torch.Tensor:
        """What the target picks after each node of an eager forward: int64 (n,)."""
        return self.choice.after(logits, draft, sequence.text, every=drafter.needs.choices)

    def forward(self, sequence: Sequence, draft: Draft, drafter: Drafter) -> Forwarded:
        """A draft of the drafter's that the host has, forwarded: eagerly, or padded to one of a few fixed shapes."""
        if self.execution == "eager":
            logits = self.target.forward(sequence.cache, draft)
            sequence.mark("forward")
            return Forwarded(self.chosen(sequence, draft, logits, drafter), logits, self.target.hidden)
        n = len(draft.tree)
        padded, launch = self.padded(sequence.cache, n, drafter, sequence.mark)
        padded.feed(draft, sequence.cache.length)
        launch()
        choices, candidates = padded.read(n) if draft.tree.device.type == "cpu" else padded.on_device(n)
        sequence.mark("forward")
        hidden = None if padded.hidden is None else padded.hidden[:n]  # what a replay wrote, no hook has seen
        return Forwarded(choices, padded.logits[:n], hidden, candidates)

    def whole(self, cache: TreeCache, drafter: DeviceDrafter, mark: Mark) -> tuple[WholeStep, Callable[[], None]]:
        """The step of the drafter's tree and source now, and what runs it."""
        tree, setup = drafter.tree, self._setup(cache, len(drafter.tree))
        key = type(drafter), tree, drafter.source, setup.bucket
        return self._kept(key, lambda: WholeStep(setup, drafter, tree), cache, mark)

    def padded(
        self, cache: TreeCache, nodes: int, drafter: Drafter, mark: Mark
    ) -> tuple[PaddedForward, Callable[[], None]]:
        """A forward that holds a draft of `nodes` nodes, of those that the drafter makes; and what runs it."""
        most = drafter.max_nodes
        rows = min(next((n for n in ROWS if n >= nodes), most), most)
        setup = self._setup(cache, rows)
        key = type(drafter), rows, setup.bucket
        return self._kept(key, lambda: PaddedForward(setup, drafter, rows), cache, mark)

    def _setup(self, cache: TreeCache, nodes: int) -> Setup:
        """Of a step of so many nodes. With the tree kernel, whose cost follows the length, it sees the whole cache."""
        whole = self._on_cuda and self.target.switch is not None
        bucket = cache.capacity if whole else min(bucket_of(cache.length + nodes), cache.capacity)
        return Setup(self.target, cache, bucket, self.choice, self.execution == "compiled")

    def _kept(
        self, key: Hashable, make: Callable[[], Made], cache: TreeCache, mark: Mark
    ) -> tuple[Made, Callable[[], None]]:
        """The step of that key, made if it is not there."""
        if key not in self._made:
            self._make_room()
            self.target.synchronize()
            start = time.perf_counter()
            step = make()
            self._made[key] = (step, step.run if self.execution == "static" else self._prepared(step, cache.length))
            self.target.synchronize()
            self.setup_s += time.perf_counter() - start
            mark("setup")
        self._made.move_to_end(key)
        return self._made[key]

    def _make_room(self) -> None:
        """Drop the steps used longest ago, where there are too many or a GPU's memory is short."""
        for _ in range(MOST_DROPPED):
            if not self._made or not (len(self._made) >= MOST_STEPS or self._short_of_memory()):
                return
            self._made.popitem(last=False)

    def _short_of_memory(self) -> bool:
        """Whether a GPU has too little left, of what torch holds as well, for one more captured step."""
        return self.target.device.type == "cuda" and free_bytes(self.target.device) < LEAST_FREE

    def _prepared(self, step: Repeatable, length: int) -> Callable[[], None]:
        """Compile and capture the step. Both run it, which writes into the drafter's state: that is put back."""
        before = {name: tensor.clone() for name, tensor in step.state().items()}
        step.length.fill_(length)
        try:
            with compiling(self.target.linear == "onednn") if self.execution == "compiled" else nullcontext():
                return self._captured(step, length) if self._on_cuda else self._run_once(step)
        finally:
            for name, tensor in step.state().items():
                tensor.copy_(before[name])

    @property
    def _on_cuda(self) -> bool:
        return self.target.device.type == "cuda"

    def _run_once(self, step: Repeatable) -> Callable[[], None]:
        step.run()
        return step.run

    def _captured(self, step: Repeatable, length: int) -> Callable[[], None]:
        def warm_up() -> None:
            step.run()
            step.length.fill_(length)  # what it wrote lies behind the committed tokens

        return self.target.graphs.capture(lambda: step.run(), warm_up)  # as it is when it is captured
