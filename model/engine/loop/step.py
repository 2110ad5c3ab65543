"""Steps of sequences, and what executes them: eager, static or as CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...devices import Run, free_bytes
from ...errors import UserError
from ..attention.cache import TreeCache
from ..attention.layers import torch_precision
from ..contract.drafter import Device, DeviceDrafter, DeviceSession, Drafter, Session
from ..graphs.static_step import ROWS, Forwarded, Setup, StaticForward, StaticStep, bucket_of
from ..rule.sampling import GREEDY, Choice, Sampling, candidates_of
from ..rule.tree import Draft
from ..rule.verification import Verification, verify
from ..target.target import Target
from .answer import Decoding, Mark, unmarked

# Static steps kept for a drafter on a cache; the least recently used is dropped first. All sizes of
# nodes=auto over all buckets of 4,096 tokens are fewer, so that none of them is captured twice.
MAX_STEPS = 192
MIN_FREE = 1 << 29  # free bytes of a GPU below which a step is dropped before another one is made,
MIN_STEPS = 8  # unless fewer are left: all sizes over one bucket would be captured again and again
AnyStatic = TypeVar("AnyStatic", StaticStep, StaticForward)


def conclude(
    sequence: Decoding, drafter: Drafter, draft: Draft, forwarded: Forwarded
) -> Verification:
    """Verify a draft after its forward; the caller commits and observes."""
    if len(draft.tree) > drafter.max_nodes:
        raise UserError(
            f"{type(drafter).__name__}: a draft of {len(draft.tree)} nodes is over its max_nodes"
        )
    needs = drafter.needs
    logits = forwarded.logits
    choices = forwarded.choices
    if choices is None:
        assert logits is not None
        choices = sequence.session.choice.after(
            logits, draft, sequence.text, every=needs.choices, over=sequence.over
        )
    verification = verify(draft, choices, forwarded.tokens)
    verification.cut(sequence.over)
    if needs.logits:
        verification.logits = logits
    if needs.candidates:
        verification.candidates = forwarded.candidates
        verification.log_probs = forwarded.log_probs
        if forwarded.candidates is None:
            assert logits is not None
            verification.candidates, verification.log_probs = candidates_of(
                logits, needs.candidates, needs.log_probs
            )
    if forwarded.hidden is not None:
        verification.hidden = forwarded.hidden[-len(draft.tree) :]
    return verification


class Steps:
    """Takes steps of the sequences of a cache: draft, forward, verify, commit, observe.

    Attributes:
        members: the sequences, of one drafter, by stretch of the cache.
    """

    def __init__(self, cache: TreeCache, executor: Executor) -> None:
        self.cache = cache
        self.executor = executor
        self.members = dict[int, Decoding]()

    def take(self) -> float:
        """Take a step of all members. Returns the seconds spent on a new shape."""
        executor = self.executor
        members = self.members.values()
        width = len(members)
        sizing = next(iter(members)).session.drafter.sizing
        clock = executor.target.clock
        setup_before = executor.setup_s
        nodes = 0
        tokens = 0
        start = clock()
        is_plain = sizing is not None and sizing.begin_step(width)
        with executor.target.beside_loop():
            verifications = self.verified(
                [executor.plain if is_plain else member.session for member in members]
            )
        setup_s = executor.setup_s - setup_before
        for member, verification in zip(members, verifications, strict=True):
            member.start += setup_s  # all times but `setup_s` exclude it
            member.out.setup_s += setup_s / width
            if is_plain:
                member.session.skip(verification.tokens)
            member.add(verification, width)
            nodes += len(verification.draft.tree) - 1
            tokens += len(verification.tokens)
        seconds = clock() - start
        if sizing is not None and not setup_s and seconds > 0:  # a clock may stand still
            if width > 1:  # their mean lies between the sizes that they chose
                nodes = min(sizing.sizes, key=lambda size: abs(size - nodes / width))
            sizing.observe(nodes, tokens / width, seconds)
        return setup_s

    def verified(self, sessions: Sequence[Session]) -> list[Verification]:
        executor = self.executor
        target = executor.target
        drafter: Any = sessions[0].drafter
        roots = [member.text[-1] for member in self.members.values()]
        with target.drafting():
            if drafter.joins:
                drafts = drafter.draft_all(roots)
            else:
                # a drafter writes its next draft, of a sequence of this batch or one that the
                # user's processors decode meanwhile, into the same tensor
                drafts = list[Draft]()
                for session, root in zip(sessions, roots, strict=True):
                    draft = session.draft(root)
                    drafts.append(replace(draft, tokens=draft.tokens.clone()))
        if target.recurrent and not drafts[0].tree.is_chain:  # which has no batches
            drafts = [sessions[0].likeliest_chain(drafts[0])]
        executor.mark("draft")
        by_stretch = dict(zip(self.members, drafts, strict=True))
        outputs = executor.forward(self.cache, by_stretch, drafter)
        executor.mark("forward")
        paths: list[Sequence[int]] = [()] * len(self.cache.lengths)
        verifications = []
        for (stretch, draft), forwarded in zip(by_stretch.items(), outputs, strict=True):
            verification = conclude(self.members[stretch], drafter, draft, forwarded)
            paths[stretch] = verification.path[: len(verification.tokens)]
            verifications.append(verification)
        executor.mark("verify")
        self.cache.commit(*paths)
        executor.mark("commit")
        if drafter.joins:
            drafter.observe_all(verifications)
        else:
            for session, verification in zip(sessions, verifications, strict=True):
                session.observe(verification)
        executor.mark("observe")
        return verifications


class Step(Steps):
    """Takes steps of one sequence in a cache of its own.

    Raises:
        UserError: the sampling reads the text, but the execution needs steps of fixed shape.
    """

    def __init__(self, sequence: Decoding) -> None:
        request = sequence.request
        cache = sequence.cache
        drafter = sequence.session.drafter
        if request.execution != "eager" and request.sampling.reads_text:
            raise UserError(
                "sampling: a repetition penalty and other processors that read the text take"
                f" execution=eager, not {request.execution}"
            )
        super().__init__(cache, Executor.of(sequence.target, cache, drafter, request.execution))
        self.members[0] = sequence
        self.executor.set_rule([request.sampling])
        self.executor.mark = request.mark
        self._precision = torch_precision()
        # holds root and length on the device; None: the host has them
        self._last: StaticStep | None = None

    def __call__(self) -> None:
        if torch_precision() != self._precision:
            self.cache.committed_by = ()  # its states have several precisions
        self.take()

    def verified(self, sessions: Sequence[Session]) -> list[Verification]:
        on_device = isinstance(self.members[0].session, DeviceSession)
        if self.executor.execution != "eager" and on_device:
            return [self._on_device(sessions[0])]
        return super().verified(sessions)

    def _on_device(self, session: Any) -> Verification:
        sequence = self.members[0]
        cache = self.cache
        drafter = session.drafter
        session.choose()

        def place(step: StaticStep) -> None:
            step.root.fill_(sequence.text[-1])
            step.length.fill_(cache.length)

        shape = drafter.tree, drafter.source
        nodes = len(drafter.tree)
        step, launch = self.executor.made(StaticStep, drafter, shape, nodes, cache, place)
        if step is not self._last:
            place(step)
            self._last = step
        launch()
        draft = Draft(step.tree, step.tokens, drafter.source)
        node, *choices = step.commit.read()
        count = step.tree.depth_of[node] + 1
        verification = Verification(
            draft, step.choices, step.commit.accepted, node, choices[:count]
        )
        self.executor.mark("step")
        cache.length += count
        session.settle(verification)
        verification.cut(sequence.over)
        session.account(verification)
        return verification


class Executor:
    """Executes a drafter's steps on one cache; static ones are made when first needed, and kept.

    `execution=static` runs without a GPU what `graph` captures, for tests.

    Attributes:
        choice: the target's rule in static steps; None: each sequence has a rule of its own.
        plain: a session that drafts nothing, for the plain steps of another drafter.
        mark: see `Request`; of the current sequence.
        most: columns of a batch's stretch: a context, a draft, unused rows.
        setup_s: seconds spent on making static steps, which do not count as decoding.

    Raises:
        UserError: the target has no such execution.
    """

    def __init__(self, target: Target, device: Device, execution: str = "eager") -> None:
        self.target = target
        self.execution = target.check_execution(execution)
        self._choices = dict[Sampling, Choice]()  # by settings of seed 0
        self.set_rule([GREEDY])
        plain = DeviceDrafter(device)
        plain.joins = True
        self.plain = plain.session()
        self.mark: Mark = unmarked
        self.most = target.context + 2 * ROWS[-1]
        self.setup_s = 0.0
        self._made_for: tuple[int, Any] = (0, ())  # capacity of the cache, mode of the model
        # by drafter, tree or rows, ...
        self._steps: dict[tuple[Any, ...], tuple[Any, Run]] = {}

    @staticmethod
    def of(target: Target, cache: TreeCache, drafter: Drafter, execution: str) -> Executor:
        """Return the executor of a drafter's steps on this cache; eager ones are not kept."""
        if execution == "eager":
            return Executor(target, drafter.device)
        executor = drafter.executors.get(cache)
        if executor is None or executor.execution != execution:
            executor = drafter.executors[cache] = Executor(target, drafter.device, execution)
        return executor

    def set_rule(self, samplings: Sequence[Sampling]) -> None:
        # eager steps draw for accepted nodes alone, as on a CPU each row takes long
        is_eager = self.execution == "eager"
        alone = any(each.reads_text or (is_eager and each.temperature) for each in samplings)
        rules = set() if alone else {replace(each, seed=0) for each in samplings}
        self.choice = None
        if len(rules) == 1:  # they differ in their seeds alone
            rule = rules.pop()
            if rule not in self._choices:
                self._choices[rule] = Choice(rule, self.target.device)
            self.choice = self._choices[rule]
            self.choice.set_seeds(*(each.seed for each in samplings))

    def forward(
        self, cache: TreeCache, drafts: dict[int, Draft], drafter: Drafter
    ) -> list[Forwarded]:
        """Return the outputs of drafts of this drafter, by stretch of the cache."""
        is_eager = self.execution == "eager"
        is_alone = len(cache.lengths) == 1
        if is_eager and is_alone:
            hidden = drafter.needs.hidden
            return [Forwarded(None, *self.target.forward(cache, drafts[0], hidden=hidden))]
        n = sum(len(draft.tree) for draft in drafts.values())
        rows = n if is_eager else rows_of(n)
        if is_alone:
            rows = min(rows, drafter.max_nodes)
        columns = [cache.lengths[at] + len(draft.tree) for at, draft in drafts.items()]
        columns[-1] += rows - n  # unused rows
        cache.make_room(max(columns), self.most)
        stretches = [(at * cache.room, cache.lengths[at]) for at in drafts]
        listed = [*drafts.values()]

        def feed(forward: StaticForward) -> None:
            forward.feed(listed, stretches)

        depths = 1
        if self.choice is not None and self.choice.draws:
            depths = min(rows_of(1 + max(draft.tree.max_depth for draft in listed)), rows)
        shape = rows, len(cache.lengths), depths
        forward, launch = self.made(StaticForward, drafter, (shape, None), rows, cache, feed)
        feed(forward)
        launch()
        return forward.forwarded(listed, copied=self.execution == "graph")

    def made(
        self,
        kind: type[AnyStatic],
        drafter: Any,
        shape: tuple[Any, Any],
        nodes: int,
        cache: TreeCache,
        feed: Callable[[AnyStatic], None],
    ) -> tuple[AnyStatic, Run]:
        """Return the step or forward of this shape for the cache's length, and what runs it.

        Args:
            feed: gives it an input, for its warm-up.
        """
        bucket = min(bucket_of(cache.length + nodes), cache.capacity)
        # a table reads no other columns than those seen, and a batch's are anywhere
        if self.target.attends_by_table or len(cache.lengths) > 1:
            bucket = cache.capacity
        setup = Setup(self.target, cache, bucket, self.choice)
        if self.execution == "eager":
            step = kind(setup, drafter, shape[0])
            return step, step.run
        made_for = cache.capacity, self.target.mode
        if self._made_for != made_for:  # buffers or layers were replaced
            self._steps.clear()
        self._made_for = made_for  # the same object until the next sequence, for the comparison
        key = type(drafter), *shape, torch_precision(), bucket, self.choice
        if key not in self._steps:
            self._drop_oldest()
            self.target.synchronize()
            start = time.perf_counter()
            step = kind(setup, drafter, shape[0])
            feed(step)
            self._steps[key] = (
                step,
                self._capture(step) if self.execution == "graph" else step.run,
            )
            self.target.synchronize()
            self.setup_s += time.perf_counter() - start
            self.mark("setup")
        self._steps[key] = self._steps.pop(key)  # now the most recently used
        return self._steps[key]

    def _drop_oldest(self) -> None:
        device = self.target.device
        is_short = device.type == "cuda" and free_bytes(device) < MIN_FREE
        if len(self._steps) >= (MIN_STEPS if is_short else MAX_STEPS):
            plain = self.plain.drafter.tree, (1, 1, 1)  # which are needed again
            drafting = (key for key in self._steps if key[1] not in plain)
            self._steps.pop(next(drafting, ()), None)

    def _capture(self, step: StaticStep | StaticForward) -> Run:
        # warm-up runs write the drafter's state and the length
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
    return next((rows for rows in ROWS if rows >= nodes), -(-nodes // ROWS[-1]) * ROWS[-1])
