"""One decoding step, in two forms with the same outcome: eager, and static for drafters whose topology stays.

The static form keeps root, length and draft on the device, has the same shapes every time, and reads back one small
tensor a step; so it can be compiled, or captured as one CUDA graph and replayed.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch

from .cache import TreeCache
from .compiling import compiling
from .drafter import DeviceDrafter, DeviceSession, Session
from .selection import argmax
from .target import Target
from .tree import Draft, Tree
from .verification import Verification, standing, told, verify

BUCKET = 256  # a static step attends over the context rounded up to a multiple of this
MOST_STEPS = 64  # static steps kept for a drafter on a cache; the one used longest ago goes first
Mark = Callable[[str], None]


def unmarked(phase: str) -> None:
    """The default `mark`: nobody is timing phases."""


def conclude(
    target: Target, cache: TreeCache, session: Session, draft: Draft, logits: torch.Tensor, mark: Mark = unmarked
) -> Verification:
    """Verify, commit, observe: what follows a forward over a draft of n nodes, whose logits (n, V) these are."""
    verification = verify(draft, argmax(logits))
    mark("verify")
    tree, node = draft.tree, verification.node
    accepted = tree.depth_of[node] + 1
    cache.commit(accepted, None if tree.is_chain else tree.paths[node, 1:accepted])
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


class StaticStep:
    """The step of one tree over one bucket of the cache, all on the device.

    `run` reads and writes buffers that stay where they are: `root` (1,), `length` (), `report` (1 + max_depth + 1,).
    """

    def __init__(
        self, target: Target, cache: TreeCache, drafter: DeviceDrafter, tree: Tree, bucket: int, *, compiled: bool
    ) -> None:
        self.target, self.drafter, self.tree, self.bucket, self.compiled = target, drafter, tree, bucket, compiled
        self._cache = weakref.ref(cache)  # a larger one may take its place, and this must not keep it
        device, n = target.device, len(tree)
        self.root = torch.zeros(1, dtype=torch.long, device=device)
        self.length = torch.zeros((), dtype=torch.long, device=device)
        self.report = torch.zeros(2 + tree.max_depth, dtype=torch.long, device=device)
        self.tokens = self.choices = torch.zeros(n, dtype=torch.long, device=device)
        self.stands = torch.zeros(n, dtype=torch.bool, device=device)
        self._nodes = torch.arange(n, device=device)
        self._columns = torch.arange(bucket, device=device)
        self._depths = torch.arange(tree.max_depth + 1, device=device)
        self._attention = target.tree_attention(tree, bucket, self.length)
        if self._attention is not None:
            return
        blocked = torch.finfo(target.dtype).min
        zero = torch.zeros(n, n, dtype=target.dtype, device=device)
        # (n, n + 2): the tree's own mask between a column that all attend to and one that none does
        self._mask = torch.cat((zero[:, :1], zero.masked_fill(~tree.ancestors, blocked), zero[:, :1] + blocked), dim=1)

    def _mask_now(self) -> torch.Tensor | None:
        """(n, bucket): committed columns show node -1, the tree's columns its nodes, those behind them node n."""
        if self._attention is not None:
            return None
        node = (self._columns - self.length + 1).clamp(0, len(self.tree) + 1)  # (bucket,)
        return self._mask.index_select(1, node)

    def run(self) -> None:
        """One step. No host value is read and nothing of another shape is made."""
        tree, cache = self.tree, self._cache()
        assert cache is not None
        tokens = self.drafter.grow(self.root)  # (n,)
        at = self._nodes + self.length  # where the tree's states are written
        where = (tree.depths + self.length, at, self.bucket)
        attended: dict[str, Any] = {"mask": self._mask_now(), "attention": self._attention}
        logits = self.target.forward_static(cache, tokens, *where, **attended, compiled=self.compiled)
        choices = argmax(logits)  # (n,)
        stands, winner = standing(tree, tokens, choices)  # (n,), (1,)
        path = tree.paths.index_select(0, winner)[0]  # (max_depth + 1,), itself repeated at the end
        cache.move(path + self.length, self._depths + self.length)
        self.drafter.learn(tokens, logits, stands)
        if self.target.hidden is not None:
            self.drafter.take(self.target.hidden.index_select(0, winner))
        # for whoever looks before the next step overwrites them
        self.tokens, self.choices, self.stands = tokens, choices, stands
        self.report.copy_(torch.cat((winner, choices.index_select(0, path))))
        self.root.copy_(choices.index_select(0, winner))
        self.length.add_(tree.depths.index_select(0, winner)[0] + 1)


class StaticSteps:
    """A drafter's static steps on one cache: one for each tree, source and bucket, made when first needed.

    The target's execution says how: static (as it is), graph (captured as one CUDA graph and replayed), compiled (the
    model's forward by torch.compile; on CUDA the step is captured, too, as its host work would hide what that gains).

    Attributes:
        setup_s: seconds spent on making steps so far, compiling and capturing included. They are not decoding: a tree
            and bucket are paid for by whichever prompt comes first, and again only behind MOST_STEPS others.
    """

    def __init__(self, target: Target, cache: TreeCache, drafter: DeviceDrafter) -> None:
        self.target, self.execution = target, target.execution
        self.drafter = weakref.proxy(drafter)  # which owns this: a cycle would keep its tensors until it is collected
        self._cache = weakref.ref(cache)
        self.setup_s = 0.0
        self._made: OrderedDict[Hashable, tuple[StaticStep, Callable[[], None]]] = OrderedDict()

    @staticmethod
    def of(target: Target, cache: TreeCache, drafter: DeviceDrafter) -> StaticSteps:
        """Those that there are already for this cache, which is the target's, and its execution; or new ones."""
        kept = drafter.static_steps
        steps = kept.get(cache)
        if steps is None or steps.execution != target.execution:
            steps = kept[cache] = StaticSteps(target, cache, drafter)
        return steps

    def made(self, tree: Tree, bucket: int, mark: Mark) -> tuple[StaticStep, Callable[[], None]]:
        """The step of a tree over a bucket, by the drafter's source now, and what runs it."""
        key = (tree, self.drafter.source, bucket)
        if key not in self._made:
            cache = self._cache()
            assert cache is not None
            while len(self._made) >= MOST_STEPS:
                self._made.popitem(last=False)
            self.target.synchronize()
            start = time.perf_counter()
            compiled = self.execution == "compiled"
            step = StaticStep(self.target, cache, self.drafter, tree, bucket, compiled=compiled)
            self._made[key] = (step, step.run if self.execution == "static" else self._prepared(step, cache.length))
            self.target.synchronize()
            self.setup_s += time.perf_counter() - start
            mark("setup")
        self._made.move_to_end(key)
        return self._made[key]

    def _prepared(self, step: StaticStep, length: int) -> Callable[[], None]:
        """Compile and capture the step. Both run it, which writes into the drafter's state: that is put back."""
        before = {name: tensor.clone() for name, tensor in self.drafter.step_state().items()}
        step.length.fill_(length)
        try:
            with compiling(self.target.packed) if self.execution == "compiled" else nullcontext():
                return self._captured(step, length) if self._on_cuda else self._run_once(step)
        finally:
            for name, tensor in self.drafter.step_state().items():
                tensor.copy_(before[name])

    @property
    def _on_cuda(self) -> bool:
        return self.target.device.type == "cuda"

    def _run_once(self, step: StaticStep) -> Callable[[], None]:
        step.run()
        return step.run

    def _captured(self, step: StaticStep, length: int) -> Callable[[], None]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step.run()
                step.length.fill_(length)  # what it wrote lies behind the committed tokens
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One pool for all: a step's own numbers are done with when the next one is replayed, so they share the memory.
        with torch.cuda.graph(graph, pool=self.target.graph_pool):
            step.run()
        return graph.replay


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
        tree = method.tree
        bucket = min(-(-(cache.length + len(tree)) // BUCKET) * BUCKET, cache.capacity)
        step, launch = self.steps.made(tree, bucket, self.mark)
        if step is not self._now:
            step.root.fill_(root)
            step.length.fill_(cache.length)
            self._now = step
        launch()
        verification = told(Draft(tree, step.tokens, method.source), step.choices, step.stands, step.report)
        self.mark("step")
        cache.length += tree.depth_of[verification.node] + 1
        self.session.account(verification)
        return verification


def make_step(target: Target, cache: TreeCache, session: Session, mark: Mark) -> EagerStep | StaticSequence:
    """The form of step that the target's execution asks for; eager where the session drafts as it likes."""
    if target.execution == "eager" or not isinstance(session, DeviceSession):
        return EagerStep(target, cache, session, mark)
    return StaticSequence(target, cache, session, mark)
