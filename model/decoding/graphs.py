"""Steps captured as CUDA graphs: on one stream a device, into one pool of memory a target."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .devices import current

_capturing = threading.RLock()  # the stream is the process's, and what else ran on it would be captured, too
WARM_UPS = 2  # runs before a capture: what compiles, plans or allocates does so outside the graph


class Graphs:
    """The captured steps of one target, which share their memory: a step is read before the next one is replayed.

    torch gives a pool back when its last graph goes, and opening the same pool once more is an error or, worse, memory
    that is still in use. So one tiny graph stays as long as this object does. A pool for all targets of the process
    would do for that, too, but two models in two threads would then write over each other's steps, and memory of a
    model that is gone could not go to the next one's weights.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: tuple[Any, ...] = ()  # the pool, the tiny graph and its tensor

    def capture(self, run: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
        """Run `warm_up` some times, then capture `run`, which does not run it. Returns what replays it."""
        with _capturing, current(self.device):
            stream, now = _stream(self.device), torch.cuda.current_stream()
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    warm_up()
            now.wait_stream(stream)
            replay: Callable[[], None] = self._captured(run, stream).replay
            return replay

    def _captured(self, run: Callable[[], None], stream: Any) -> Any:
        """The graph. Other threads may go on with what a capture of their own would not allow."""
        if not self._kept:
            pool, tiny = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(tiny, pool=pool, stream=stream, capture_error_mode="thread_local"):
                tensor = torch.zeros(1, device=self.device)
            self._kept = pool, tiny, tensor
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._kept[0], stream=stream, capture_error_mode="thread_local"):
            run()
        return graph


@cache
def _stream(device: torch.device) -> Any:
    """A device's stream for warm-ups and captures alike: cuBLAS keeps 32 MiB for each stream that it has met."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
