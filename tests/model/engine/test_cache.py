"""The cache: what is committed is what a plain cache would hold, in place, without reallocation."""

import pytest
import torch

from model.engine import Draft, Target, Tree, generate
from model.methods import make_method
from tests.conftest import greedy, toy_model


def test_commit_moves_the_accepted_rows_and_nothing_else(llama):
    target = Target(llama)
    with target.cache(8) as cache:
        pass
    for buffer in cache._buffers:
        buffer.copy_(torch.arange(buffer.shape[2])[:, None].expand(buffer.shape[2:]))
    cache.length = 10
    cache.commit([0, 2, 5])
    for buffer in cache._buffers:
        assert buffer[0, 0, :15, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 13, 14]
    assert cache.length == 13
    cache.commit(range(2))
    assert cache.length == 15


def test_allocated_once_and_reused(llama):
    target = Target(llama)
    target.reserve(8)
    (first,) = target.caches._free
    where = [b.data_ptr() for b in first._buffers]
    draft = Draft(Tree.chain(0), torch.tensor([5]))
    for _ in range(3):
        with target.cache(8) as cache:
            target.prefill(cache, [3, 4, 5], draft)
            assert cache is first and [b.data_ptr() for b in cache._buffers] == where
            with target.cache(8) as other:
                assert other is not cache
    heads = 2
    dim = 8
    layers = 2
    tokens = 256 + 16  # 8 nodes, and a multiple of 16
    assert sum(buffer.nbytes for buffer in cache._buffers) == 2 * layers * heads * dim * 4 * tokens


@pytest.mark.parametrize(("name", "method"), [("llama-grouped", "pld"), ("gpt2", "vanilla")])
def test_a_cache_grows_and_ends_at_the_context(name, method, monkeypatch):
    """A long limit costs nothing before the text is long."""
    monkeypatch.setattr("model.engine.loop.loop.ROOM", 4)
    model = toy_model(name)
    prompt = [5, 6, 7, 8, 5, 6]
    target = Target(model, context=64)
    drafter = make_method(method, target)
    for limit, most in ((4, 32), (1000, 64 + drafter.max_nodes + 16)):
        out = generate(target, drafter, prompt, max_new_tokens=limit)
        assert out.tokens == greedy(model, prompt, min(limit, 58))
        (cache,) = target.caches._free
        assert cache.capacity <= most
