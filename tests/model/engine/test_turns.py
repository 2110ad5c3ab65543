"""Turns of threads that share a model; their answers are in test_contract."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from model.engine import LAST, Draft, Target, Tree
from model.engine.devices import Turns, synchronize, turns_of
from tests.conftest import toy_model


def test_hidden_states_are_those_of_the_threads_own_forward():
    """A forward of another thread's within it: the hook must not hear it."""
    model, ids = toy_model("llama"), torch.tensor([[5, 6, 7, 8]])
    target, states = Target(model), model(ids, output_hidden_states=True).hidden_states

    def meanwhile(*_):
        if threading.current_thread() is threading.main_thread():
            pool.submit(model, ids[:, :2]).result()

    model.lm_head.register_forward_hook(meanwhile)
    with ThreadPoolExecutor(1) as pool, target.cache(1) as cache:
        hidden = target.prefill(
            cache, [5, 6, 7, 8], Draft(Tree.chain(0), torch.tensor([8])), hidden=(1, LAST)
        ).hidden
    torch.testing.assert_close(hidden, torch.cat((states[1], states[LAST]), -1)[0])


def test_threads_progress_side_by_side():
    """A plain lock is mostly taken again by its last holder, before those who wait have woken up."""
    turns, order, start = Turns(), [], threading.Barrier(4)

    def work(i):
        start.wait()
        for _ in range(40):
            with turns:
                order.append(i)
                time.sleep(0.002)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    begin = max(order.index(i) for i in range(4))
    end = min(len(order) - order[::-1].index(i) for i in range(4))
    assert sum(one == other for one, other in itertools.pairwise(order[begin:end])) <= 0.2 * (
        end - begin
    )


def test_a_turn_is_taken_again_inside_itself_and_released_to_who_waits():
    model = toy_model("llama")
    turns, got = turns_of(model), threading.Event()
    assert Target(model).turns is turns is Target(model).turns
    with turns, turns:
        waiting = threading.Thread(target=lambda: [turns.__enter__(), got.set(), turns.__exit__()])
        waiting.start()
        assert not got.wait(0.05)
        with turns:  # while another one waits in the queue
            pass
    assert got.wait(5)
    waiting.join()


def test_a_gpu_is_waited_for_by_its_stream(monkeypatch):
    """To wait for all of it would break off what another thread captures."""
    waited, gpu = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    stream = SimpleNamespace(synchronize=lambda: waited.append(True))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: stream if device == gpu else None
    )
    synchronize(gpu)
    assert waited
