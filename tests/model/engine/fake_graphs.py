"""Stand-ins for CUDA graphs: the host's part of a captured step, on a CPU, and where cuBLAS's workspaces lie."""

import weakref
from collections import Counter
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch

from model.engine import Target
from model.engine.static_step import StaticForward, StaticStep


class FakeGraphs:
    """Stands in for CUDA graphs: what is captured is not run, as on CUDA, and run by each replay.

    torch keeps a workspace for each stream on which something was multiplied, in the pool of the graph that is being
    captured, or in the general one. One that nobody keeps is unmapped by the next capture, as that empties torch's
    cache, unless it lies in the pool of a graph that is alive. Dropping a graph drops its stream's workspace.
    """

    def __init__(self, monkeypatch):
        self.captured, self.replays, self.alive = [], 0, Counter()  # graphs by pool
        # of the only stream: its pool, None the general one; and former ones
        self.workspace, self.freed = (
            None,
            [],
        )
        graphs = self

        class Graph:
            def replay(self):
                graphs.replays += 1
                assert self.workspace.mapped, "a replay writes to a workspace that was given back"
                if isinstance(self.step, StaticStep):
                    assert self.step.drafter.source == self.source, (
                        "a replay fills the tree from where the capture did"
                    )
                self.run()

        @contextmanager
        def capture(graph, pool, stream, capture_error_mode):
            assert capture_error_mode == "thread_local", "other threads go on"
            self.empty_cache()
            graphs.alive[pool] += 1
            weakref.finalize(graph, graphs.drop, pool)
            real = {kind: kind.run for kind in (StaticStep, StaticForward)}

            def record(step):
                graph.step, graph.run = step, partial(real[type(step)], step)
                graph.source = step.drafter.source if isinstance(step, StaticStep) else None
                graph.workspace = graphs.multiply(pool)

            for kind in real:
                kind.run = record  # not by monkeypatch, which keeps what it replaces: the graph
            yield
            for kind, run in real.items():
                kind.run = run
            if hasattr(graph, "step"):  # not the one that only keeps the pool open
                graphs.captured.append(weakref.ref(graph))

        @contextmanager
        def on_stream(stream):
            self.multiply(None)  # a warm-up
            yield

        stream = SimpleNamespace(wait_stream=lambda other: None)
        fakes = {"graph_pool_handle": object}
        fakes |= {
            "Stream": lambda *device: stream,
            "current_stream": lambda: stream,
            "CUDAGraph": Graph,
            "graph": capture,
            "stream": on_stream,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(
            torch._C, "_cuda_clearCublasWorkspaces", self.clear_workspaces, raising=False
        )

    def multiply(self, pool):
        """Return the stream's workspace; where there is none allocate it in that pool."""
        self.workspace = self.workspace or SimpleNamespace(pool=pool, mapped=True)
        return self.workspace

    def clear_workspaces(self):
        if self.workspace is not None:
            self.freed.append(self.workspace)
            self.workspace = None

    def drop(self, pool):
        self.clear_workspaces()
        self.alive[pool] -= 1

    def empty_cache(self):
        for workspace in self.freed:
            workspace.mapped &= self.alive[workspace.pool] > 0

    def target(self, model):
        """On the CPU, and yet captured."""
        target = Target(model)
        target.check_execution = lambda name: name
        return target
