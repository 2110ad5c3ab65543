"""One decoding step, in two forms with the same outcome, and what executes them.

A `HostStep` is drafted on the host, which also verifies and commits. A `DeviceStep` is drafted on the device: root,
length and draft stay there, and one small tensor is read back. The `Executor` alone decides between eager, static and
captured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..errors import UserError
from .cache import TreeCache
from .devices import free_bytes, without_cudnn
from .drafter import DeviceDrafter, DeviceSession, Drafter, Session
from .layers import mode_of
from .sampling import GREEDY, Candidates, Choice, Sampling, candidates_of
from .static_step import ROWS, PaddedForward, Setup, WholeStep, bucket_of
from .target import Target
from .tree import Draft
from .verification import Verification, verify

# Static steps kept for a drafter on a cache, the least recently used dropped first. All sizes of tree=auto over all
# buckets of 4,096 tokens are fewer, so that none of these is captured twice.
MOST_STEPS = 192
MOST_RULES = 3  # sampling settings whose steps are kept for it: conversations of several may go in turns
LEAST_FREE = 1 << 29  # free bytes of a GPU below which a step is dropped before another one is made,
LEAST_STEPS = 8  # unless so few are left: all sizes over one bucket, which would be captured again and again
Mark = Callable[[str], None]
Ends = Callable[[list[int]], bool]
AnyStep = TypeVar("AnyStep", WholeStep, PaddedForward)


def unmarked(phase: str) -> None:
    """Do nothing: the default `mark`, without timing of phases."""


@dataclass(slots=True)
class Forwarded:
    """The outputs of a forward over a draft of n nodes.

    Attributes:
        choices: int64 (n,), the target's token after each node, as far as the method needs it.
        logits: (n, V); None if the method does not need them.
        hidden: (m, H), of the n nodes, preceded by a prompt's own if forwarded with it; None if not kept.
        candidates: top-k and bits, if the forward computed them already.
    """

    choices: torch.Tensor
    logits: torch.Tensor | None
    hidden: torch.Tensor | None
    candidates: Candidates | None = None


@dataclass
class Sequence:
    """A sequence that is being decoded.

    Attributes:
        text: the prompt and the output so far, the root last.
        execution: of its steps; see `Executor`.
        end: limit of prompt and answer together.
        eos: ids that end an answer.
        ends: asked once after each token, given the text so far: True if the answer ends there.
        ended: True once it did.
        asked: the length of the text that it was last given.
    """

    target: Target
    cache: TreeCache
    session: Session
    text: list[int]
    sampling: Sampling = GREEDY
    execution: str = "eager"
    mark: Mark = unmarked
    end: int = sys.maxsize
    eos: Collection[int] = ()
    ends: Ends | None = None
    ended: bool = False
    asked: int = 0

    @property
    def left(self) -> int:
        """Tokens that the answer may still have."""
        return self.end - len(self.text)

    def over(self, new: list[int]) -> bool:
        """True if the answer ends with the last of a step's new tokens."""
        length = len(self.text) + len(new)
        if self.ends is not None and length > self.asked:
            self.asked, self.ended = length, self.ends([*self.text, *new])
        return (self.ended and length == self.asked) or new[-1] in self.eos or len(new) == self.left


def conclude(
    session: Session,
    draft: Draft,
    forwarded: Forwarded,
    *,
    over: Callable[[list[int]], bool],
    cache: TreeCache | None = None,
    mark: Mark = unmarked,
) -> Verification:
    """Verify, commit and observe after a forward over a draft of n nodes.

    Args:
        over: the answer's end, as `Verification.cut` takes it.
        cache: where to commit the accepted nodes; None: the caller commits.
    """
    if len(draft.tree) > session.method.max_nodes:
        raise UserError(f"{type(session.method).__name__}: a draft of {len(draft.tree)} nodes is over its max_nodes")
    verification = verify(draft, forwarded.choices)
    mark("verify")
    verification.cut(over)
    tree, count = draft.tree, len(verification.tokens)  # what is cut off is not committed
    if cache is not None:
        cache.commit(count, None if tree.is_chain else tree.below(verification.node)[: count - 1])
    mark("commit")
    needs, logits = session.method.needs, forwarded.logits
    if needs.logits:
        verification.logits = logits
    if needs.candidates:
        candidates = forwarded.candidates
        if candidates is None:
            assert logits is not None
            candidates = candidates_of(logits, needs.candidates, needs.bits)
        verification.candidates, verification.bits = candidates
    if forwarded.hidden is not None:
        verification.hidden = forwarded.hidden[-len(tree) :]
    session.observe(verification)
    mark("observe")
    return verification


def rests(session: Session) -> bool:
    """True if the next step is a plain one, by the method's `Sizing`."""
    return session.method.sizing is not None and session.method.sizing.rests()


class HostStep:
    """Draft, forward, verify, commit, observe: whatever the session drafts."""

    def __init__(self, sequence: Sequence, executor: Executor) -> None:
        self.sequence, self.executor = sequence, executor
        self._plain = executor.idle.session()

    def __call__(self) -> Verification:
        sequence, plain = self.sequence, rests(self.sequence.session)
        session = self._plain if plain else sequence.session
        self.executor.choice.set_seed(sequence.sampling.seed)  # as sequences of other seeds may step in between
        with without_cudnn(sequence.target.device):  # a method's own network
            draft = session.draft(sequence.text[-1])
        if self.sequence.target.recurrent and not draft.tree.is_chain:
            draft = session.likeliest_chain(draft)
        sequence.mark("draft")
        forwarded = self.executor.forward(sequence, draft, session.method)
        verification = conclude(session, draft, forwarded, over=sequence.over, cache=sequence.cache, mark=sequence.mark)
        if plain:
            sequence.session.passed(verification.tokens)
        return verification


class DeviceStep:
    """The same for a session whose step runs on the device."""

    def __init__(self, sequence: Sequence, executor: Executor) -> None:
        assert isinstance(sequence.session, DeviceSession)
        self.sequence, self.session, self.executor = sequence, sequence.session, executor
        self._last: WholeStep | None = None  # holds root and length on the device; None: the host has them

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
        self.executor.choice.set_seed(sequence.sampling.seed)  # as above
        launch()
        draft = Draft(step.tree, step.tokens, method.source)
        verification = Verification.of_report(draft, step.choices, step.commit.accepted, step.commit.read())
        sequence.mark("step")
        sequence.cache.length += step.tree.depth_of[verification.node] + 1
        verification.cut(sequence.over)
        if plain:
            self.session.passed(verification.tokens)
        else:
            self.session.account(verification)
        return verification


def make_step(sequence: Sequence) -> HostStep | DeviceStep:
    """Make the step for the sequence's execution and the session's kind.

    Raises:
        UserError: what is sampled reads the text, and steps are to be of fixed shape.
    """
    executor = Executor.of(sequence)
    on_device = executor.execution != "eager" and isinstance(sequence.session, DeviceSession)
    return DeviceStep(sequence, executor) if on_device else HostStep(sequence, executor)


class Executor:
    """Executes a drafter's steps on one cache; steps of fixed shape are made when first needed, and kept.

    The execution says how: eager (the model as it is called), graph (of fixed shape, captured as one CUDA
    graph and replayed), static (what is captured, run as it is: for tests without a GPU).

    Attributes:
        choice: the target's rule, for the sequence of the current step.
        idle: drafts and learns nothing; takes the plain steps of a method whose drafts do not pay.
        setup_s: seconds spent on making steps so far, capturing included. They do not count as decoding:
            the first prompt pays for a shape, and a later one only after MOST_STEPS others.

    Raises:
        UserError: the target has no such execution.
    """

    def __init__(self, target: Target, sampling: Sampling = GREEDY, execution: str = "eager") -> None:
        self.target, self.execution = target, target.check_execution(execution)
        self.choice, self._choices = Choice(sampling, target.device), dict[Sampling, Choice]()  # by settings, no seed
        self.idle = DeviceDrafter(target.device)
        self.setup_s, self.captured_by = 0.0, (0, "")
        self._steps: dict[tuple[Any, ...], tuple[Any, Callable[[], None]]] = {}  # by drafter, tree or rows, ...

    @staticmethod
    def of(sequence: Sequence) -> Executor:
        """Return the executor for this cache and execution, drawing by this sampling; make it if there is none.

        Eager executors hold no steps, so they are not kept. Raises UserError as `make_step` says.
        """
        sampling, execution = sequence.sampling, sequence.execution
        if execution == "eager":
            return Executor(sequence.target, sampling)
        if sampling.reads_text:
            raise UserError(
                "sampling: a repetition penalty and other processors that read the text take execution=eager, "
                f"not {execution}"
            )
        executors = sequence.session.method.executors
        executor, captured_by = executors.get(sequence.cache), (sequence.cache.capacity, mode_of(sequence.target.model))
        if executor is None or executor.execution != execution or executor.captured_by != captured_by:
            executor = executors[sequence.cache] = Executor(sequence.target, sampling, execution)
            executor.captured_by = captured_by  # buffers and layers are others since
        executor._draw_by(sampling)
        return executor

    def _draw_by(self, sampling: Sampling) -> None:
        """Take the rule of these settings and its steps; of those of earlier settings forget all but the last few."""
        rule = replace(sampling, seed=0)
        self.choice = self._choices.pop(rule) if rule in self._choices else Choice(sampling, self.target.device)
        self._choices[rule] = self.choice  # the last one used
        self.choice.set_seed(sampling.seed)
        while len(self._choices) > MOST_RULES:
            oldest = self._choices.pop(next(iter(self._choices)))
            self._steps = {key: step for key, step in self._steps.items() if step[0].choice is not oldest}

    def forward(self, sequence: Sequence, draft: Draft, drafter: Drafter) -> Forwarded:
        """Forward a draft that the host has: eagerly, or padded to one of a few fixed shapes."""
        if self.execution == "eager":
            logits = self.target.forward(sequence.cache, draft)
            hidden = self.target.hidden  # now, as a processor may forward the model, too
            sequence.mark("forward")
            every = drafter.needs.choices
            choices = self.choice.after(logits, draft, sequence.text, every=every, over=sequence.over)
            return Forwarded(choices, logits, hidden)
        n = len(draft.tree)
        padded, launch = self.padded(sequence.cache, n, drafter, sequence.mark)
        padded.feed(draft, sequence.cache.length)
        launch()
        choices, candidates = padded.read(n) if draft.tree.device.type == "cpu" else padded.on_device(n)
        sequence.mark("forward")
        hidden = None if padded.hidden is None else padded.hidden[:n]  # a replay calls no hook
        return Forwarded(choices, None if padded.logits is None else padded.logits[:n], hidden, candidates)

    def whole(self, cache: TreeCache, drafter: DeviceDrafter, mark: Mark) -> tuple[WholeStep, Callable[[], None]]:
        """Return the step for the drafter's current tree and source, and the function that runs it."""
        tree, setup = drafter.tree, self._setup(cache, len(drafter.tree))
        key = type(drafter), tree, drafter.source, setup.bucket, self.choice
        return self._step_for(key, lambda: WholeStep(setup, drafter, tree), cache, mark)

    def padded(
        self, cache: TreeCache, nodes: int, drafter: Drafter, mark: Mark
    ) -> tuple[PaddedForward, Callable[[], None]]:
        """Return a forward that holds a draft of `nodes` nodes, and the function that runs it."""
        most = drafter.max_nodes
        rows = min(next((n for n in ROWS if n >= nodes), most), most)
        setup = self._setup(cache, rows)
        key = type(drafter), rows, setup.bucket, self.choice
        return self._step_for(key, lambda: PaddedForward(setup, drafter, rows), cache, mark)

    def _setup(self, cache: TreeCache, nodes: int) -> Setup:
        """Return the setup of a step of so many nodes behind what the cache holds."""
        bucket = min(bucket_of(cache.length + nodes), cache.capacity)
        return Setup(self.target, cache, bucket, self.choice)

    def _step_for(
        self, key: tuple[Any, ...], make: Callable[[], AnyStep], cache: TreeCache, mark: Mark
    ) -> tuple[AnyStep, Callable[[], None]]:
        """Return the step of that key; make it if there is none."""
        if key not in self._steps:
            self._drop_oldest()
            self.target.synchronize()
            start = time.perf_counter()
            step = make()
            self._steps[key] = (step, step.run if self.execution == "static" else self._captured(step, cache.length))
            self.target.synchronize()
            self.setup_s += time.perf_counter() - start
            mark("setup")
        self._steps[key] = self._steps.pop(key)  # the last one used
        return self._steps[key]

    def _drop_oldest(self) -> None:
        """Drop a step if there are too many or a GPU's memory is short; no plain one, which is needed again."""
        if len(self._steps) >= MOST_STEPS or (len(self._steps) >= LEAST_STEPS and self._short_of_memory()):
            drafting = (key for key in self._steps if key[1] is not self.idle.tree and key[1] != 1)
            self._steps.pop(next(drafting, ()), None)

    def _short_of_memory(self) -> bool:
        """True if a GPU has too little free memory, torch's own reserve included, for one more captured step."""
        return self.target.device.type == "cuda" and free_bytes(self.target.device) < LEAST_FREE

    def _captured(self, step: WholeStep | PaddedForward, length: int) -> Callable[[], None]:
        """Capture the step. Warming up runs it, which writes the drafter's state: that is restored."""
        before = {name: tensor.clone() for name, tensor in step.state().items()}
        step.length.fill_(length)

        def warm_up() -> None:
            step.run()
            step.length.fill_(length)  # what it wrote lies behind the committed tokens

        try:
            return self.target.graphs.capture(lambda: step.run(), warm_up)  # as it is when it is captured
        finally:
            for name, tensor in step.state().items():
                tensor.copy_(before[name])
