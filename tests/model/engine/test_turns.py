"""The lock of threads that share a model; their answers are in test_contract."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from model.engine import LAST, Draft, Target, Tree
from model.engine.devices import turns_of
from tests.conftest import toy_model


def test_hidden_states_are_those_of_the_threads_own_forward():
    """A forward of another thread's within it: the hook must not hear it."""
    model = toy_model("llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    target = Target(model)
    states = model(ids, output_hidden_states=True).hidden_states

    def meanwhile(*_):
        if threading.current_thread() is threading.main_thread():
            pool.submit(model, ids[:, :2]).result()

    model.lm_head.register_forward_hook(meanwhile)
    draft = Draft(Tree.chain(0), torch.tensor([8]))
    with ThreadPoolExecutor(1) as pool, target.cache(1) as cache:
        hidden = target.prefill(cache, [5, 6, 7, 8], draft, hidden=(1, LAST)).hidden
    torch.testing.assert_close(hidden, torch.cat((states[1], states[LAST]), -1)[0])


def test_a_lock_is_taken_again_inside_itself_and_is_one_of_all_targets():
    model = toy_model("llama")
    turns = turns_of(model)
    assert Target(model).turns is turns is Target(model).turns
    with turns, turns, ThreadPoolExecutor(1) as pool:
        assert not pool.submit(turns.acquire, timeout=0.05).result()
