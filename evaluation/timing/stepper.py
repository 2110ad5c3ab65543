"""Time steps of one execution at a fixed context, and count their device calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.decoding import DeviceDrafter, Target
from model.decoding.cache import TreeCache
from model.decoding.step import Sequence, make_step
from model.recycling.auto import best_of
from model.vanilla import Vanilla

from .floor import LAUNCHES, runtime_calls
from .forecast import K

TIMING = 3  # synchronisations of a counted burst that are not its steps'
STEPS = 4  # of a burst; few, so that the text after the context stays short


@dataclass(frozen=True)
class Burst:
    """Several steps in a row.

    Attributes:
        seconds: of one step, without setup.
        setup_s: seconds to build steps meanwhile, with compiling and capturing.
    """

    seconds: float
    setup_s: float


class Stepper:
    """One execution of steps on a model, with its own cache.

    Args:
        target: in the execution to be timed.
        sizes: nodes below the root.
    """

    def __init__(self, name: str, target: Target, cache: TreeCache, sizes: tuple[int, ...]) -> None:
        self.name, self.target, self.cache = name, target, cache
        # A drafter per size, so that a tree's steps are built once; None is plain decoding, which learns nothing.
        self.drafters: dict[int | None, DeviceDrafter] = {None: Vanilla(target.device)}
        for n in sizes:
            drafter = best_of(target, K, n)
            assert isinstance(drafter, DeviceDrafter)
            self.drafters[n] = drafter
        self._context, self._root = 0, 0

    @classmethod
    @contextmanager
    def opened(cls, name: str, target: Target, sizes: tuple[int, ...]) -> Iterator[Stepper]:
        """Open one, with a cache for the largest draft."""
        with target.cache(1 + max(sizes)) as cache:
            yield cls(name, target, cache, sizes)

    def go_to(self, prompt: list[int]) -> None:
        """Take further steps after this prompt."""
        self.target.prefill(self.cache, prompt)
        self._context, self._root = self.cache.length, prompt[-1]

    @torch.inference_mode()
    def burst(self, n: int | None, steps: int = STEPS) -> Burst:
        """Time steps with n nodes, after one that is not counted."""
        self.cache.length = self._context
        sequence = Sequence(self.target, self.cache, self.drafters[n].session(), [self._root])
        step = make_step(sequence)
        before = step.executor.setup_s
        sequence.text += step().tokens
        self.target.synchronize()
        warm, start = step.executor.setup_s, time.perf_counter()
        for _ in range(steps):
            sequence.text += step().tokens
        self.target.synchronize()  # wait for the writes of the whole burst at once
        elapsed = time.perf_counter() - start - (step.executor.setup_s - warm)
        return Burst(elapsed / steps, step.executor.setup_s - before)

    def calls(self, n: int | None) -> dict[str, float] | str:
        """Count a step's launches, copies and synchronisations on CUDA; operators, copies and host reads on a CPU.

        Returns a text if they cannot be counted.
        """
        if self.target.device.type == "cuda":
            return cuda_calls(runtime_calls(lambda: self.burst(n), self.target.device))
        if self.target.execution == "compiled":
            return "not counted: compiled code is out of an operator counter's sight"
        with CountedOperators() as counted:
            self.burst(n)
        return {name: count / (1 + STEPS) for name, count in operator_calls(counted.counts).items()}


class CountedOperators(TorchDispatchMode):
    """Counts operators by name while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def operator_calls(counts: Counter[str]) -> dict[str, int]:
    """Count all operators, copies among them, and single numbers read by the host."""
    reads = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero")  # in inference mode only the last two occur
    copies = ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::index_copy_")
    return {
        "operators": counts.total(),
        "copies": sum(counts[name] for name in copies),
        "host_reads": sum(counts[name] for name in reads),
    }


def cuda_calls(calls: dict[str, int]) -> dict[str, float]:
    """Count per step: launched kernels (or graphs), graphs among them, copies, and waits except the timing's."""

    def each(*parts: str) -> float:
        return sum(count for name, count in calls.items() if any(part in name for part in parts)) / (1 + STEPS)

    return {
        "launches": sum(calls.get(name, 0) for name in LAUNCHES) / (1 + STEPS),
        "graphs": each("GraphLaunch"),
        "copies": each("Memcpy"),
        "waits": max(each("Synchronize") - TIMING / (1 + STEPS), 0.0),
    }
