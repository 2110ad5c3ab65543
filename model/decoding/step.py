"""One decoding step, in two forms with the same outcome: eager, and static for drafters whose topology stays.

The static form keeps root, length and draft on the device, has the same shapes every time, and reads back one small
tensor a step; so it can be compiled, or captured as one CUDA graph and replayed.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from .drafter import Draft, Drafter
from .selection import argmax
from .target import Target
from .tree import Tree
from .verification import Verification, deepest_on_device, verify

BUCKET = 256  # a static step attends over the context rounded up to a multiple of this
MOST_STEPS = 64  # static steps kept for a drafter; the one used longest ago goes first
Mark = Callable[[str], None]


def unmarked(phase: str) -> None:
    """The default `mark`: nobody is timing phases."""


def conclude(
    target: Target, drafter: Drafter, draft: Draft, logits: torch.Tensor, mark: Mark = unmarked
) -> Verification:
    """Verify, commit, observe: what follows a forward over a draft of n nodes, whose logits (n, V) these are."""
    verification = verify(draft, logits)
    mark("verify")
    target.commit(verification)
    mark("commit")
    if drafter.needs_logits:
        verification.logits = logits
    if target.hidden is not None:  # behind a prompt's own, if it was forwarded with the prompt
        verification.hidden = target.hidden[-len(draft.tree) :]
    drafter.observe(verification)
    mark("observe")
    return verification


class EagerStep:
    """Draft, forward, verify, commit, observe: whatever the drafter drafts."""

    setup_s = 0.0  # nothing is made for a tree

    def __init__(self, target: Target, drafter: Drafter, mark: Mark) -> None:
        self.target, self.drafter, self.mark = target, drafter, mark

    def __call__(self, root: int) -> Verification:
        draft = self.drafter.draft(root)
        self.mark("draft")
        logits = self.target.forward(draft)
        self.mark("forward")
        return conclude(self.target, self.drafter, draft, logits, self.mark)


class StaticStep:
    """The step of one tree over one bucket of the cache, all on the device.

    `run` reads and writes buffers that stay where they are: `root` (1,), `length` (), `report` (1 + max_depth + 1,).
    """

    def __init__(self, target: Target, drafter: Drafter, tree: Tree, bucket: int) -> None:
        self.target, self.drafter, self.tree, self.bucket = target, drafter, tree, bucket
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
        blocked = torch.finfo(target.dtype).min
        zero = torch.zeros(n, n, dtype=target.dtype, device=device)
        # (n, n + 2): the tree's own mask between a column that all attend to and one that none does
        self._mask = torch.cat((zero[:, :1], zero.masked_fill(~tree.ancestors, blocked), zero[:, :1] + blocked), dim=1)

    def _mask_now(self) -> torch.Tensor:
        """(n, bucket): committed columns show node -1, the tree's columns its nodes, those behind them node n."""
        node = (self._columns - self.length + 1).clamp(0, len(self.tree) + 1)  # (bucket,)
        return self._mask.index_select(1, node)

    def run(self) -> None:
        """One step. No host value is read and nothing of another shape is made."""
        tree, cache = self.tree, self.target.cache
        tokens = self.drafter.grow(self.root)  # (n,)
        at = self._nodes + self.length  # where the tree's states are written
        seen = self._attention or self._mask_now()
        logits = self.target.forward_static(tokens, tree.depths + self.length, at, self.bucket, seen)
        choices = argmax(logits)  # (n,)
        stands, winner, path = deepest_on_device(tree, tokens, choices)  # (n,), (1,), (max_depth + 1,)
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
    """Runs static steps for a drafter: one for each tree, source and bucket, made when first needed.

    The target's execution says how: static (as it is), graph (captured as one CUDA graph and replayed), compiled (the
    model's forward by torch.compile; on CUDA the step is captured, too, as its host work would hide what that gains).

    Attributes:
        setup_s: seconds spent on making steps so far, compiling and capturing included. They are not decoding: a tree
            and bucket are paid for by whichever prompt comes first, and again only behind MOST_STEPS others.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target, self.execution = target, target.execution
        self.drafter = weakref.proxy(drafter)  # which owns this: a cycle would keep its tensors until it is collected
        self._cache = weakref.ref(target.cache)  # a larger one may take its place, and this must not keep it
        self.setup_s = 0.0
        self._made: OrderedDict[Hashable, tuple[StaticStep, Callable[[], None]]] = OrderedDict()
        self._now: StaticStep | None = None
        self.mark: Mark = unmarked

    def fits(self, target: Target) -> bool:
        """Whether these steps can go on: made for this target, its present cache and its execution."""
        return self.target is target and self._cache() is target.cache and self.execution == target.execution

    def begin(self) -> None:
        """A new prompt: root and length come from the host again."""
        self._now = None

    def __call__(self, root: int) -> Verification:
        self.drafter.choose()
        tree, cache = self.drafter.tree, self.target.cache
        assert tree is not None
        bucket = min(-(-(cache.length + len(tree)) // BUCKET) * BUCKET, cache.capacity)
        step, launch = self._step(tree, bucket)
        if step is not self._now:
            step.root.fill_(root)
            step.length.fill_(cache.length)
            self._now = step
        launch()
        node, *chosen = step.report.tolist()  # the one transfer of a step
        self.mark("step")
        cache.length += tree.depth_of[node] + 1
        draft = Draft(tree, step.tokens, self.drafter.source)
        verification = Verification(draft, step.choices, step.stands, node, chosen[: tree.depth_of[node] + 1])
        self.drafter.account(verification)
        return verification

    def _step(self, tree: Tree, bucket: int) -> tuple[StaticStep, Callable[[], None]]:
        key = (tree, self.drafter.source, bucket)
        if key not in self._made:
            while len(self._made) >= MOST_STEPS:
                self._made.popitem(last=False)
            self.target.synchronize()
            start = time.perf_counter()
            step = StaticStep(self.target, self.drafter, tree, bucket)
            self._made[key] = (step, step.run if self.execution == "static" else self._prepared(step))
            self.target.synchronize()
            self.setup_s += time.perf_counter() - start
            self.mark("setup")
        self._made.move_to_end(key)
        return self._made[key]

    def _prepared(self, step: StaticStep) -> Callable[[], None]:
        """Compile and capture the step. Both run it, which writes into the drafter's state: that is put back."""
        before = {name: tensor.clone() for name, tensor in self.drafter.step_state().items()}
        step.length.fill_(self.target.cache.length)
        launch = self._captured(step) if self._on_cuda else self._run_once(step)
        for name, tensor in self.drafter.step_state().items():
            tensor.copy_(before[name])
        return launch

    @property
    def _on_cuda(self) -> bool:
        return self.target.device.type == "cuda"

    def _run_once(self, step: StaticStep) -> Callable[[], None]:
        step.run()
        return step.run

    def _captured(self, step: StaticStep) -> Callable[[], None]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step.run()
                step.length.fill_(self.target.cache.length)  # what it wrote lies behind the committed tokens
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One pool for all: a step's own numbers are done with when the next one is replayed, so they share the memory.
        with torch.cuda.graph(graph, pool=self.target.graph_pool):
            step.run()
        return graph.replay


def make_step(target: Target, drafter: Drafter, mark: Mark) -> EagerStep | StaticSteps:
    """The form of step that the target's execution asks for; eager where the drafter's topology changes."""
    if target.execution == "eager" or drafter.tree is None:
        return EagerStep(target, drafter, mark)
    steps = drafter.static_steps
    if not isinstance(steps, StaticSteps) or not steps.fits(target):
        steps = drafter.static_steps = StaticSteps(target, drafter)
    steps.mark = mark
    steps.begin()
    return steps
