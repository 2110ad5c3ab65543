"""Stand-ins for CUDA graphs: the host's part of a captured step, on a CPU."""

import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import torch

from model.engine import Target
from model.engine.static_step import PaddedForward, WholeStep


class FakeGraphs:
    """Stands in for CUDA graphs: what is captured is not run, as on CUDA, and run by each replay."""

    def __init__(self, monkeypatch):
        self.captured, self.replays, self.alive = [], 0, Counter()  # graphs by pool
        graphs = self

        class Graph:
            def replay(self):
                graphs.replays += 1
                if isinstance(self.step, WholeStep):
                    assert self.step.drafter.source == self.source, "a replay fills the tree from where the capture did"
                self.run()

        @contextmanager
        def capture(graph, pool, stream, capture_error_mode):
            assert capture_error_mode == "thread_local", "other threads go on"
            graphs.alive[pool] += 1
            weakref.finalize(graph, graphs.alive.subtract, [pool])
            whole, fed = WholeStep.run, PaddedForward.run

            def record(step):
                graph.step, graph.run = step, partial(whole if isinstance(step, WholeStep) else fed, step)
                graph.source = step.drafter.source if isinstance(step, WholeStep) else None

            WholeStep.run = PaddedForward.run = record  # not by monkeypatch, which keeps what it replaces: the graph
            yield
            WholeStep.run, PaddedForward.run = whole, fed
            if hasattr(graph, "step"):  # not the one that only keeps the pool open
                graphs.captured.append(weakref.ref(graph))

        stream = SimpleNamespace(wait_stream=lambda other: None)
        fakes = {"graph_pool_handle": object}
        fakes |= {
            "Stream": lambda *device: stream,
            "current_stream": lambda: stream,
            "CUDAGraph": Graph,
            "graph": capture,
        }
        for name, fake in (fakes | {"stream": lambda stream: nullcontext()}).items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def target(self, model):
        """On the CPU, and yet captured."""
        target = Target(model)
        target.check_execution = lambda name: name
        return target
