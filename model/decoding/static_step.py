"""Steps of fixed shape, all on the device: compiled, or captured as one CUDA graph and replayed.

Of a drafter of the device's kind the whole step is one, of any other the forward with the choices: its draft is fed in,
whatever tree it has.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from .attention import WORD, packed
from .cache import TreeCache
from .compiling import compiling
from .devices import on_host_like, wait
from .drafter import DeviceDrafter, Drafter
from .sampling import GREEDY, Choice, Sampling
from .selection import Found
from .settlement import Settlement
from .static_forward import StaticForward
from .target import Target
from .tree import Draft, Tree

BUCKET = 256  # a static step attends over the context rounded up to a multiple of this; of a long one to more
# Rows of a step whose draft is fed in: the least of these that holds it, so that a few steps serve all drafts.
ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Static steps kept for a drafter on a cache; the one used longest ago goes first. All sizes of tree=auto over all
# buckets of 4,096 tokens are fewer: else each would be captured anew whenever it comes up.
MOST_STEPS = 192
LEAST_FREE = 1 << 30  # bytes of a GPU below which steps go before others are made
Mark = Callable[[str], None]


def bucket_of(tokens: int) -> int:
    """The bucket that holds so many: multiples of BUCKET up to 4 of them, then 6, 8, 12, 16, ...

    So a context of 4,096 has 8 and not 16, and no more than a third of a bucket is read for nothing.
    """
    buckets = -(-tokens // BUCKET)
    if buckets > 4:
        part = 1 << (buckets - 1).bit_length() - 2
        buckets = -(-buckets // part) * part
    return buckets * BUCKET


class Step(Protocol):
    """What is made once and run again and again."""

    length: torch.Tensor

    def run(self) -> None:
        """One step. No host value is read and nothing of another shape is made."""

    def state(self) -> dict[str, torch.Tensor]:
        """What a run writes into that outlives it."""


AStep = TypeVar("AStep", bound=Step)


class StaticStep:
    """The step of one tree over one bucket of the cache, for a drafter that works on the device.

    `run` reads and writes buffers that stay where they are: `root` (1,), `length` () and what else `settlement` has.
    """

    def __init__(
        self,
        target: Target,
        cache: TreeCache,
        drafter: DeviceDrafter,
        tree: Tree,
        bucket: int,
        *,
        choice: Choice,
        compiled: bool,
    ) -> None:
        self.choice = choice
        # the drafter owns its steps: a cycle would keep its tensors until it is collected
        self.target, self.drafter, self.tree, self._cache = target, weakref.proxy(drafter), tree, weakref.ref(cache)
        self.length = torch.zeros((), dtype=torch.long, device=target.device)
        self.forward = StaticForward(target, cache, len(tree), bucket, self.length, compiled=compiled)
        self.forward.set_tree(tree)
        self.settlement = Settlement(tree, self.length)
        self.root, self._k = self.settlement.root, drafter.needs_candidates
        self.tokens = self.choices = torch.zeros(len(tree), dtype=torch.long, device=target.device)

    def run(self) -> None:
        own, cache = self.settlement, self._cache()
        assert cache is not None
        tokens = self.drafter.grow(self.root)  # (n,)
        logits = self.forward(tokens)
        places = self.forward.positions if self.choice.draws else None
        choices, candidates, _ = self.choice.ranked(logits, places, self._k)  # (n,), (n, k)
        own(tokens, choices)
        if not self.tree.is_chain:  # what stands of a chain is where it belongs
            cache.move(own.source, own.to)
        if candidates is not None:
            self.drafter.learn(tokens, candidates, own.stands)
        if self.target.hidden is not None:
            self.drafter.take(self.target.hidden.index_select(0, own.report[:1]))
        self.tokens, self.choices = tokens, choices  # for whoever looks before the next step overwrites them

    def state(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.drafter.step_state()  # a proxy has no types
        return found


class FedStep:
    """A step's forward over one bucket of the cache, and what the target picks, for drafts of up to n nodes.

    Attributes, of the last run:
        logits, choices: (n, V) and int64 (n,).
        hidden: (n, H), where the target keeps it.
    """

    def __init__(
        self,
        target: Target,
        cache: TreeCache,
        drafter: Drafter,
        nodes: int,
        bucket: int,
        *,
        choice: Choice,
        compiled: bool,
    ) -> None:
        self.target, self.choice, self._n = target, choice, nodes
        self._k, self._needs_bits = drafter.needs_candidates, drafter.needs_bits
        # One buffer goes in: length, tokens, depths, ancestors as `packed` has them. One comes out: see `_reported`.
        self._sizes = [1, nodes, nodes, nodes * -(-nodes // WORD)]
        self._fed = torch.zeros(sum(self._sizes), dtype=torch.long, device=target.device)
        length, self._tokens, self._depths, words = torch.split(self._fed, self._sizes)
        self.length, self._words = length[0], words.view(nodes, -1)
        self._host = on_host_like(self._fed)
        self._report = on_host_like(self._fed.new_zeros(nodes, 1 + self._k * (1 + self._needs_bits)))
        self.forward = StaticForward(target, cache, nodes, bucket, self.length, compiled=compiled)
        self._words.copy_(packed(torch.ones(1, 1, dtype=torch.bool), nodes))  # for a run before anything is fed
        self._out = self.logits = self.choices = self._tokens
        self.hidden: torch.Tensor | None = None
        self._found: Found = None, None

    def feed(self, draft: Draft, length: int) -> None:
        """The draft of the next run, and the committed tokens. Nodes that are left over hold any tokens.

        What the last run was fed was used when its report was read.
        """
        tree, n = draft.tree, len(draft.tree)
        there, tokens, depths, words = torch.split(self._host, self._sizes)
        there.fill_(length)
        depths.zero_()
        depths[:n] = torch.from_numpy(np.array(tree.depth_of))
        words.view(self._n, -1).copy_(packed(tree.host_ancestors, self._n))
        if draft.tokens.device.type == "cpu":
            tokens[:n] = draft.tokens
        self._fed.copy_(self._host, non_blocking=True)
        if draft.tokens.device.type != "cpu":  # a drafter's that works on the device: they are not waited for
            self._tokens[:n].copy_(draft.tokens)

    def run(self) -> None:
        self.forward.take(self._depths, self._words)
        self.logits = self.forward(self._tokens)
        places = self.forward.positions if self.choice.draws else None
        self.choices, *found = self.choice.ranked(self.logits, places, self._k, self._needs_bits)
        self._found, self.hidden = (found[0], found[1]), self.target.hidden
        self._out = self._reported()

    def _reported(self) -> torch.Tensor:
        """Choices, candidates and bits side by side, as far as there are any: int64 (n, 1 + k + k)."""
        candidates, bits = self._found
        parts = [self.choices[:, None]]
        if candidates is not None:
            parts.append(candidates)
        if bits is not None:
            parts.append(bits.double().view(torch.long))
        return torch.cat(parts, 1)

    def read(self, n: int) -> tuple[torch.Tensor, Found]:
        """The choices (n,) of the first n nodes, candidates and bits as `found` has them, on the host: one transfer."""
        self._report.copy_(self._out, non_blocking=True)
        wait(self._out.device)
        choices, candidates, bits = self._report[:n].clone().tensor_split((1, 1 + self._k), 1)
        found = candidates if self._k else None, bits.view(torch.double).float() if self._needs_bits else None
        return choices[:, 0], found

    def found(self, n: int) -> Found:
        """Candidates and bits of the first n nodes, (n, k) each, on the device, as far as the drafter needs them."""
        candidates, bits = self._found
        return None if candidates is None else candidates[:n], None if bits is None else bits[:n]

    def state(self) -> dict[str, torch.Tensor]:
        return {}


class StaticSteps:
    """A drafter's static steps on one cache: one for each shape, made when first needed.

    The target's execution says how: static (as it is), graph (captured as one CUDA graph and replayed), compiled (the
    model's forward by torch.compile; on CUDA the step is captured, too, as its host work would hide what that gains).

    Attributes:
        setup_s: seconds spent on making steps so far, compiling and capturing included. They are not decoding: a shape
            is paid for by whichever prompt comes first, and again only behind MOST_STEPS others.
    """

    def __init__(self, target: Target, sampling: Sampling = GREEDY) -> None:
        self.target, self.execution, self.choice = target, target.execution, Choice(sampling, target.device)
        self.setup_s = 0.0
        self._made: OrderedDict[Hashable, tuple[Any, Callable[[], None]]] = OrderedDict()

    @staticmethod
    def of(target: Target, cache: TreeCache, drafter: Drafter, sampling: Sampling = GREEDY) -> StaticSteps:
        """Those that there are for this cache, which is the target's, its execution and this sampling; or new ones."""
        kept = drafter.static_steps
        steps = kept.get(cache)
        if (
            steps is None
            or steps.execution != target.execution
            or replace(steps.choice.sampling, seed=0) != replace(sampling, seed=0)
        ):
            steps = kept[cache] = StaticSteps(target, sampling)
        return steps

    def whole(self, cache: TreeCache, drafter: DeviceDrafter, mark: Mark) -> tuple[StaticStep, Callable[[], None]]:
        """The step of the drafter's tree and source now, and what runs it."""
        tree, bucket = drafter.tree, self._bucket(cache, len(drafter.tree))

        def make(compiled: bool) -> StaticStep:
            return StaticStep(self.target, cache, drafter, tree, bucket, choice=self.choice, compiled=compiled)

        return self._kept((tree, drafter.source, bucket), make, cache, mark)

    def fed(self, cache: TreeCache, nodes: int, drafter: Drafter, mark: Mark) -> tuple[FedStep, Callable[[], None]]:
        """A step that holds a draft of `nodes` nodes, of those that the drafter makes; and what runs it."""
        most = drafter.max_nodes
        rows = min(next((n for n in ROWS if n >= nodes), most), most)
        bucket = self._bucket(cache, rows)

        def make(compiled: bool) -> FedStep:
            return FedStep(self.target, cache, drafter, rows, bucket, choice=self.choice, compiled=compiled)

        return self._kept((rows, bucket), make, cache, mark)

    def _bucket(self, cache: TreeCache, nodes: int) -> int:
        """Positions that a step may see: with the tree kernel, whose cost follows the length, all there are."""
        if self._on_cuda and self.target.switch is not None:
            return cache.capacity
        return min(bucket_of(cache.length + nodes), cache.capacity)

    def _kept(
        self, key: Hashable, make: Callable[[bool], AStep], cache: TreeCache, mark: Mark
    ) -> tuple[AStep, Callable[[], None]]:
        """The step of that key, made if it is not there."""
        if key not in self._made:
            while len(self._made) >= MOST_STEPS or (self._made and self._short_of_memory()):
                self._made.popitem(last=False)
            self.target.synchronize()
            start = time.perf_counter()
            step = make(self.execution == "compiled")
            self._made[key] = (step, step.run if self.execution == "static" else self._prepared(step, cache.length))
            self.target.synchronize()
            self.setup_s += time.perf_counter() - start
            mark("setup")
        self._made.move_to_end(key)
        return self._made[key]

    def _short_of_memory(self) -> bool:
        """Whether a GPU has too little left, of what torch holds as well, for one more captured step."""
        device = self.target.device
        if device.type != "cuda":
            return False
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused < LEAST_FREE

    def _prepared(self, step: Step, length: int) -> Callable[[], None]:
        """Compile and capture the step. Both run it, which writes into the drafter's state: that is put back."""
        before = {name: tensor.clone() for name, tensor in step.state().items()}
        step.length.fill_(length)
        try:
            with compiling(self.target.linear == "packed") if self.execution == "compiled" else nullcontext():
                return self._captured(step, length) if self._on_cuda else self._run_once(step)
        finally:
            for name, tensor in step.state().items():
                tensor.copy_(before[name])

    @property
    def _on_cuda(self) -> bool:
        return self.target.device.type == "cuda"

    def _run_once(self, step: Step) -> Callable[[], None]:
        step.run()
        return step.run

    def _captured(self, step: Step, length: int) -> Callable[[], None]:
        def warm_up() -> None:
            step.run()
            step.length.fill_(length)  # what it wrote lies behind the committed tokens

        return self.target.graphs.capture(lambda: step.run(), warm_up)  # as it is when it is captured
