"""Captures by stand-ins for torch.cuda: how many graphs hold a pool, and which stream and device is captured on."""

import gc
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from model.engine import Target
from model.engine.step import Executor
from tests.conftest import toy_model


class FakeCuda:
    """Counts each pool's graphs, as torch's allocator does, and knows the current device."""

    def __init__(self, monkeypatch):
        self.holds, self.lost, self.streams, self.captures, self.now = Counter(), 0, [], [], 0
        own = self

        class Graph:
            pool = None

            def replay(self):
                """Nothing was captured."""

            def __del__(self):
                if self.pool is not None:
                    own.holds[self.pool] -= 1
                    own.lost += own.holds[self.pool] == 0

        class Stream:
            def __init__(self, device=None):
                self.device = own.now if device is None else device.index
                own.streams.append(self)

            def wait_stream(self, other):
                """Nothing runs."""

        @contextmanager
        def graph(graph, pool=None, stream=None, capture_error_mode="global"):
            graph.pool = pool
            own.holds[pool] += 1
            own.captures.append(SimpleNamespace(stream=stream, device=own.now, mode=capture_error_mode))
            yield

        @contextmanager
        def device(which):
            before, own.now = own.now, which.index
            yield
            own.now = before

        @contextmanager
        def stream(which):
            yield

        fakes = dict(CUDAGraph=Graph, Stream=Stream, graph=graph, device=device, stream=stream)
        fakes |= dict(graph_pool_handle=object, current_stream=lambda *device: Stream.__new__(Stream))
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def steps_on(index):
    """Steps of a target that calls itself that GPU's, and a step that runs nothing."""
    target = Target(toy_model("llama"))
    steps = Executor(target)
    target.device = torch.device("cuda", index)
    return steps, SimpleNamespace(run=lambda: None, length=torch.tensor(3), state=dict)


def test_a_pool_is_never_without_a_graph(cuda, monkeypatch):
    """A trial captures and drops its only graph; the pool must not be opened a second time."""
    steps, step = steps_on(0)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
    for _ in range(3):
        replay = steps._captured(step, 3)
        del replay
        gc.collect()
    assert len(cuda.holds) == 1 and cuda.lost == 0
    del steps
    gc.collect()
    assert cuda.lost == 1, "with the target its memory goes back"


def test_one_stream_a_device_and_captures_on_that_device(cuda, monkeypatch):
    made = [steps_on(index) for index in (4, 5)]
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
    for steps, step in made * 2:
        steps._captured(step, 3)
    assert [stream.device for stream in cuda.streams] == [4, 5], "each is made once, for its device"
    for capture in cuda.captures:
        assert capture.device == capture.stream.device and capture.mode == "thread_local"
    assert {capture.device for capture in cuda.captures} == {4, 5} and len(cuda.holds) == 2
