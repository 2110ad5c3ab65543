"""A sequence's decoding steps, and what executes them.

| execution | a step |
|---|---|
| eager | calls the model as it is |
| static | has fixed shapes: a `StaticStep` of a `DeviceDrafter`, for other drafters a `StaticForward` |
| graph | is a static one, captured as a CUDA graph and replayed |
"""  # noqa: E501

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..errors import UserError
from .cache import TreeCache
from .devices import free_bytes
from .drafter import DeviceDrafter, DeviceSession, Drafter, Session
from .sampling import GREEDY, Choice, Sampling, candidates_of
from .static_step import ROWS, Forwarded, Setup, StaticForward, StaticStep, bucket_of
from .target import Target
from .tree import Draft
from .verification import Verification, verify

# Static steps kept for a drafter on a cache; the least recently used is dropped first. All sizes of
# nodes=auto over all buckets of 4,096 tokens are fewer, so that none of them is captured twice.
MAX_STEPS = 192
# sampling settings whose steps are kept, as conversations with different settings may alternate
MAX_SAMPLINGS = 3
MIN_FREE = 1 << 29  # free bytes of a GPU below which a step is dropped before another one is made,
MIN_STEPS = 8  # unless fewer are left: all sizes over one bucket would be captured again and again
Mark = Callable[[str], None]
Ends = Callable[[list[int]], bool]
AnyStatic = TypeVar("AnyStatic", StaticStep, StaticForward)


def unmarked(phase: str) -> None:
    """Do nothing: the default `mark`, without timing of phases."""


@dataclass
class Sequence:
    """A sequence that is being decoded."""

    target: Target
    cache: TreeCache
    session: Session
    text: list[int]  # the prompt and the output so far, the root last
    sampling: Sampling = GREEDY
    execution: str = "eager"  # of its steps; see `Executor`
    mark: Mark = unmarked
    end: int = sys.maxsize  # limit of prompt and answer together
    eos: Collection[int] = ()  # ids that end an answer
    # asked once after each token, given the text so far: True if the answer ends there
    ends: Ends | None = None
    ended: bool = False  # True once `ends` was True
    asked: int = 0  # the length of the text last given to `ends`
    overflowed: bool = False  # True once a token of the text had states that are NaN

    @property
    def left(self) -> int:
        """Tokens that the answer may still have."""
        return self.end - len(self.text)

    def settle(self, tokens: list[int], cache: TreeCache, columns: Any) -> None:
        """Make a step's tokens 0 from where the model itself overflows on.

        A plain forward's logits are all NaN after a token whose states are NaN, and their arg-max
        is 0.

        Args:
            columns: where the cache has the tokens after which these were chosen.
        """
        sound = cache.sound(columns) if 0 in tokens else len(tokens)
        sound = 0 if self.overflowed else sound
        self.overflowed = sound < len(tokens)
        tokens[sound:] = [0] * (len(tokens) - sound)

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
    drafter = session.drafter
    if len(draft.tree) > drafter.max_nodes:
        raise UserError(
            f"{type(drafter).__name__}: a draft of {len(draft.tree)} nodes is over its max_nodes"
        )
    assert forwarded.choices is not None
    verification = verify(draft, forwarded.choices)
    mark("verify")
    verification.cut(over)
    # tokens that were cut are not committed
    tree = draft.tree
    count = len(verification.tokens)
    if cache is not None:
        cache.commit(count, None if tree.is_chain else tree.below(verification.node)[: count - 1])
    mark("commit")
    needs = drafter.needs
    logits = forwarded.logits
    if needs.logits:
        verification.logits = logits
    if needs.candidates:
        candidates = forwarded.candidates
        if candidates is None:
            assert logits is not None
            candidates = candidates_of(logits, needs.candidates, needs.log_probs)
        verification.candidates, verification.log_probs = candidates
    if forwarded.hidden is not None:
        verification.hidden = forwarded.hidden[-len(tree) :]
    session.observe(verification)
    mark("observe")
    return verification


class Step:
    """Takes a sequence's steps: draft, forward, verify, commit, observe.

    A `StaticStep` runs on the device: root, length and draft stay there, and one small tensor is
    read back.

    Raises:
        UserError: the sampling reads the text, but the execution needs steps of fixed shape.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.executor = Executor.of(sequence)
        self.on_device = self.executor.execution != "eager" and isinstance(
            sequence.session, DeviceSession
        )
        self._plain = self.executor.idle.session()
        # holds root and length on the device; None: the host has them
        self._last: StaticStep | None = None

    def __call__(self) -> Verification:
        sequence = self.sequence
        sizing = self.sequence.session.drafter.sizing
        is_plain = sizing is not None and sizing.begin_step()
        session = self._plain if is_plain else sequence.session
        # sequences with other seeds may take steps in between
        self.executor.choice.set_seed(sequence.sampling.seed)
        start = sequence.cache.length
        verification = self._on_device(session) if self.on_device else self._on_host(session)
        sequence.settle(
            verification.tokens, sequence.cache, range(start, start + len(verification.tokens))
        )
        if is_plain:
            sequence.session.skip(verification.tokens)
        return verification

    def _on_host(self, session: Session) -> Verification:
        sequence = self.sequence
        with sequence.target.drafting():
            draft = session.draft(sequence.text[-1])
        if sequence.target.recurrent and not draft.tree.is_chain:
            draft = session.likeliest_chain(draft)
        sequence.mark("draft")
        forwarded = self.executor.forward(sequence, draft, session.drafter)
        return conclude(
            session, draft, forwarded, over=sequence.over, cache=sequence.cache, mark=sequence.mark
        )

    def _on_device(self, session: Any) -> Verification:
        sequence = self.sequence
        drafter = session.drafter
        session.choose()

        def place(step: StaticStep) -> None:
            step.root.fill_(sequence.text[-1])
            step.length.fill_(sequence.cache.length)

        tree = drafter.tree
        choice = self.executor.choice
        step, launch = self.executor.made(
            StaticStep,
            drafter,
            (tree, drafter.source),
            len(tree),
            sequence.cache,
            place,
            sequence.mark,
            choice,
        )
        if step is not self._last:
            place(step)
            self._last = step
        launch()
        draft = Draft(step.tree, step.tokens, drafter.source)
        verification = Verification.of_report(
            draft, step.choices, step.commit.accepted, step.commit.read()
        )
        sequence.mark("step")
        sequence.cache.length += step.tree.depth_of[verification.node] + 1
        verification.cut(sequence.over)
        session.account(verification)
        return verification


class Executor:
    """Executes a drafter's steps on one cache; static ones are made when first needed, and kept.

    `execution=static` runs without a GPU what `graph` captures, for tests.

    Attributes:
        choice: the target's rule, for the sequence of the current step.
        idle: a drafter that drafts and learns nothing, for the plain steps of another drafter.
        setup_s: seconds spent on making static steps so far, capturing included. They do not count
            as decoding: the first prompt pays for a shape, and a later one only after MAX_STEPS
                others.

    Raises:
        UserError: the target has no such execution.
    """

    def __init__(
        self, target: Target, sampling: Sampling = GREEDY, execution: str = "eager"
    ) -> None:
        self.target = target
        self.execution = target.check_execution(execution)
        # by settings, seed 0
        self.choice = Choice(sampling, target.device)
        self._choices = dict[Sampling, Choice]()
        self.idle = DeviceDrafter(target.device)
        # capacity of the cache, mode of the model
        self.setup_s = 0.0
        self.made_for = (0, ())
        # by drafter, tree or rows, ...
        self._steps: dict[tuple[Any, ...], tuple[Any, Callable[[], None]]] = {}

    @staticmethod
    def of(sequence: Sequence) -> Executor:
        """Return the executor for this cache and execution, drawing by this sampling; make it if
        there is none.

        Eager executors hold no steps, so they are not kept. Raises UserError as `Step` says.
        """
        sampling = sequence.sampling
        execution = sequence.execution
        if execution == "eager":
            return Executor(sequence.target, sampling)
        if sampling.reads_text:
            raise UserError(
                "sampling: a repetition penalty and other processors that read the text take"
                f" execution=eager, not {execution}"
            )
        executors = sequence.session.drafter.executors
        executor = executors.get(sequence.cache)
        made_for = (sequence.cache.capacity, sequence.target.mode)
        if executor is None or executor.execution != execution or executor.made_for != made_for:
            executor = executors[sequence.cache] = Executor(sequence.target, sampling, execution)
            executor.made_for = made_for  # buffers or layers were replaced
        executor._draw_by(sampling)
        return executor

    def _draw_by(self, sampling: Sampling) -> None:
        """Use the rule of these settings and its steps; drop the rules and steps of all but the
        last few settings.
        """
        rule = replace(sampling, seed=0)
        self.choice = (
            self._choices.pop(rule)
            if rule in self._choices
            else Choice(sampling, self.target.device)
        )
        self._choices[rule] = self.choice  # now the most recently used
        self.choice.set_seed(sampling.seed)
        while len(self._choices) > MAX_SAMPLINGS:
            oldest = self._choices.pop(next(iter(self._choices)))
            self._steps = {
                key: step for key, step in self._steps.items() if step[0].choice is not oldest
            }

    def forward(self, sequence: Sequence, draft: Draft, drafter: Drafter) -> Forwarded:
        """Forward a draft that the host has."""
        if self.execution == "eager":
            logits, hidden = self.target.forward(sequence.cache, draft, hidden=drafter.needs.hidden)
            sequence.mark("forward")
            every = drafter.needs.choices
            choices = self.choice.after(
                logits, draft, sequence.text, every=every, over=sequence.over
            )
            return Forwarded(choices, logits, hidden)
        stretch = 0, sequence.cache.length
        n = len(draft.tree)
        rows = min(rows_of(n), drafter.max_nodes)
        static, launch = self.static_forward(
            sequence.cache, [draft], [stretch], drafter, rows, sequence.mark
        )
        launch()
        forwarded = static.forwarded(n, on_host=draft.tree.device.type == "cpu")
        sequence.mark("forward")
        return forwarded

    def static_forward(
        self,
        cache: TreeCache,
        drafts: list[Draft],
        stretches: list[tuple[int, int]],
        drafter: Drafter,
        rows: int,
        mark: Mark = unmarked,
        *,
        greedy: bool = True,
    ) -> tuple[StaticForward, Callable[[], None]]:
        """Return a forward of so many rows, fed with these drafts, and the function that runs it.

        Args:
            stretches: see `StaticForward.feed`.
            greedy: of a batch, True if all its sequences are greedy.
        """

        def feed(forward: StaticForward) -> None:
            forward.feed(drafts, stretches)

        shape = rows, cache.stretches
        choice = self.choice if greedy else None
        if self.execution == "eager":
            forward = StaticForward(
                Setup(self.target, cache, cache.capacity, choice), drafter, shape
            )
            feed(forward)
            return forward, forward.run
        forward, launch = self.made(
            StaticForward, drafter, (shape, None), rows, cache, feed, mark, choice
        )
        feed(forward)
        return forward, launch

    def made(
        self,
        kind: type[AnyStatic],
        drafter: Any,
        shape: tuple[Any, Any],
        nodes: int,
        cache: TreeCache,
        feed: Callable[[AnyStatic], None],
        mark: Mark,
        choice: Choice | None,
    ) -> tuple[AnyStatic, Callable[[], None]]:
        """Return the step or forward of this shape for the cache's present length; make it if there
        is none.

        Args:
            feed: gives it an input, for its warm-up.
        """
        bucket = min(bucket_of(cache.length + nodes), cache.capacity)
        if self.target.attends_by_table:  # which reads no other columns than those seen
            bucket = cache.capacity
        key = type(drafter), *shape, bucket, choice
        if key not in self._steps:
            self._drop_oldest()
            self.target.synchronize()
            start = time.perf_counter()
            step = kind(Setup(self.target, cache, bucket, choice), drafter, shape[0])
            feed(step)
            self._steps[key] = (
                step,
                self._capture(step) if self.execution == "graph" else step.run,
            )
            self.target.synchronize()
            self.setup_s += time.perf_counter() - start
            mark("setup")
        self._steps[key] = self._steps.pop(key)  # now the most recently used
        return self._steps[key]

    def _drop_oldest(self) -> None:
        """Drop a step if there are too many or a GPU's memory is short. Plain steps stay, as they
        are needed again.
        """
        if len(self._steps) >= MAX_STEPS or (
            len(self._steps) >= MIN_STEPS and self._short_of_memory()
        ):
            drafting = (
                key for key in self._steps if key[1] is not self.idle.tree and key[1] != (1, 1)
            )
            self._steps.pop(next(drafting, ()), None)

    def _short_of_memory(self) -> bool:
        """True if a GPU has too little free memory, torch's own reserve included, for one more
        graph.
        """
        return self.target.device.type == "cuda" and free_bytes(self.target.device) < MIN_FREE

    def _capture(self, step: StaticStep | StaticForward) -> Callable[[], None]:
        """Capture a graph. Warm-up runs write the drafter's state and the length, which are
        restored after each.
        """
        before = {name: tensor.clone() for name, tensor in step.state().items()}

        def restore() -> None:
            for name, tensor in step.state().items():
                tensor.copy_(before[name])

        def warm_up() -> None:
            step.run()
            restore()  # the run's tokens lie after the committed ones

        try:
            # `run` is looked up at capture
            return self.target.graphs.capture(lambda: step.run(), warm_up)
        finally:
            restore()


def rows_of(nodes: int) -> int:
    """Return the rows of a static forward that holds so many nodes."""
    return next((rows for rows in ROWS if rows >= nodes), -(-nodes // ROWS[-1]) * ROWS[-1])
