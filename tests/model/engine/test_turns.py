"""The lock of threads that share a model; their answers are in test_contract."""

from concurrent.futures import ThreadPoolExecutor

from model.engine import Target
from model.engine.devices import turns_of
from tests.conftest import toy_model


def test_a_lock_is_taken_again_inside_itself_and_is_one_of_all_targets():
    model = toy_model("llama")
    turns = turns_of(model)
    assert Target(model).turns is turns is Target(model).turns
    with turns, turns, ThreadPoolExecutor(1) as pool:
        assert not pool.submit(turns.acquire, timeout=0.05).result()
