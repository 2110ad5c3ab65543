"""Stand-ins for CUDA graphs: the host's part of a captured step, on a CPU."""

import weakref
from contextlib import nullcontext
from functools import partial

import torch

from model.engine import Target
from model.engine.graphs.static_step import StaticForward, StaticStep

KINDS = StaticStep, StaticForward


class Stream:
    def wait_stream(self, other):
        pass


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
    """Stands in for what torch.cuda.graph calls: what is captured is not run, as on CUDA, and run by each replay.

    As on CUDA, a replay has its capture's autocast, and writes over other graphs' results.

    Attributes:
        captured: weak references to the graphs.
        replays: how many there were.
        stream: the current one of all threads.
    """

    def __init__(self, monkeypatch):
        self.captured = []
        self.replays = 0
        self.stream = Stream()
        graphs = self

        class Graph:
            def capture_begin(self, *pool, capture_error_mode, **others):
                assert capture_error_mode == "thread_local", "other threads go on"
                real = {kind: kind.run for kind in KINDS}

                def record(step):
                    self.step = step
                    self.autocast = torch.is_autocast_enabled("cpu")
                    self.run = partial(real[type(step)], step)

                for kind in KINDS:  # not by monkeypatch, which keeps what it replaces: the graph
                    kind.run = record
                self.real = real

            def capture_end(self):
                for kind, run in self.real.items():
                    kind.run = run
                if hasattr(self, "step"):  # not the one that only keeps the pool open
                    graphs.captured.append(weakref.ref(self))

            def replay(self):
                graphs.replays += 1
                for graph in graphs.captured:
                    if graph() not in (None, self):
                        spoil(graph().step)
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    self.run()

        class On:  # no generator, as one that is left open ends when it is collected
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                self.before = graphs.stream
                graphs.stream = self.stream

            def __exit__(self, *error):
                graphs.stream = self.before

        fakes = {
            "graph_pool_handle": object,
            "Stream": lambda *device: Stream(),
            "current_stream": lambda *device: self.stream,
            "CUDAGraph": Graph,
            "stream": On,
            "device": lambda device: nullcontext(),
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)

    def target(self, model):
        """On the CPU, and yet captured."""
        target = Target(model)
        target.check_execution = lambda name: name
        return target
