"""Stand-ins for CUDA graphs: the host's part of a captured step, on a CPU."""

import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import torch

from model.engine import Target
from model.engine.static_step import StaticForward, StaticStep


def spoil(step):
    """Write over what a run left in the memory that graphs share."""
    names = ("choices", "report", "logits", "hidden")
    results = [getattr(step, name, None) for name in names]
    if isinstance(step, StaticStep):
        results.append(step.commit.accepted)
    for result in results:
        if result is not None:
            result.zero_()


class FakeGraphs:
    """Stands in for CUDA graphs: what is captured is not run, as on CUDA, and run by each replay.

    As on CUDA, a replay has its capture's autocast, and writes over other graphs' results.

    Attributes:
        captured: weak references to the graphs.
        replays: how many there were.
    """

    def __init__(self, monkeypatch):
        self.captured = []
        self.replays = 0
        graphs = self

        class Graph:
            def replay(self):
                graphs.replays += 1
                for graph in graphs.captured:
                    if graph() not in (None, self):
                        spoil(graph().step)
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    self.run()

        @contextmanager
        def capture(graph, pool, stream, capture_error_mode):
            assert capture_error_mode == "thread_local", "other threads go on"
            real = {kind: kind.run for kind in (StaticStep, StaticForward)}

            def record(step):
                graph.step = step
                graph.autocast = torch.is_autocast_enabled("cpu")
                graph.run = partial(real[type(step)], step)

            for kind in real:
                kind.run = record  # not by monkeypatch, which keeps what it replaces: the graph
            yield
            for kind, run in real.items():
                kind.run = run
            if hasattr(graph, "step"):  # not the one that only keeps the pool open
                graphs.captured.append(weakref.ref(graph))

        stream = SimpleNamespace(wait_stream=lambda other: None)
        fakes = {
            "graph_pool_handle": object,
            "Stream": lambda *device: stream,
            "current_stream": lambda: stream,
            "CUDAGraph": Graph,
            "graph": capture,
            "stream": lambda stream: nullcontext(),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def target(self, model):
        """On the CPU, and yet captured."""
        target = Target(model)
        target.check_execution = lambda name: name
        return target
