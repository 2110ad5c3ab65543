"""The cache: what is committed is what a plain cache would hold, in place, without reallocation."""

import random

import pytest
import torch
from transformers import DynamicCache

from model.engine import Draft, Target, Tree, generate, verify
from model.engine.cache import TreeCache
from model.methods import make_method
from tests.conftest import CONFIGS, greedy, toy_model
from tests.model.engine.test_tree import random_tree


def test_commit_moves_the_accepted_rows_and_nothing_else(llama):
    target = Target(llama)
    with target.cache(8) as cache:
        pass
    for buffer in cache._buffers:
        buffer.copy_(torch.arange(buffer.shape[2])[:, None].expand(buffer.shape[2:]))
    cache.length = 10
    cache.commit(3, torch.tensor([2, 5]))
    for buffer in cache._buffers:
        assert buffer[0, 0, :15, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 13, 14]
    assert cache.length == 13
    cache.commit(2)
    assert cache.length == 15


def accept(cache, verification):
    """What the engine commits of a step."""
    path = verification.path
    cache.commit(len(path), torch.tensor(path[1:]))


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_and_values_equal_those_of_plain_decoding(name):
    """After tree steps, every committed row equals what transformers' own cache holds for the same text."""
    model, rng = toy_model(name), random.Random(5)
    target = Target(model)
    cache = target.cache(32).__enter__()
    text = [rng.randrange(3, 61) for _ in range(12)]
    draft = Draft(Tree.chain(0), torch.tensor([text[-1]]))
    verification = verify(draft, target.prefill(cache, text, draft).argmax(-1))
    accept(cache, verification)
    for _ in range(6):
        tree = random_tree(20, rng)
        text.append(verification.tokens[-1])
        tokens = torch.tensor([text[-1]] + [rng.randrange(61) for _ in range(20)])
        # Plant the right continuation on a random path, so that something deep is accepted.
        path = tree.chain_of[rng.randrange(1, 21)][1:]
        right = model.generate(
            torch.tensor([text]), max_new_tokens=len(path), do_sample=False, pad_token_id=0, eos_token_id=None
        )
        tokens[path] = right[0, len(text) :]
        draft = Draft(tree, tokens)
        verification = verify(draft, target.forward(cache, draft).argmax(-1))
        assert len(verification.tokens) >= len(path) + 1
        accept(cache, verification)
        text += verification.tokens[:-1]
    plain = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([text]), past_key_values=plain, use_cache=True)
    assert cache.length == len(text)
    for mine, theirs in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(mine.keys[:, :, : len(text)], theirs.keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(mine.values[:, :, : len(text)], theirs.values, rtol=1e-3, atol=1e-3)


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
    heads, dim, layers = 2, 8, 2
    assert cache.nbytes == 2 * layers * heads * dim * 4 * (256 + 16)  # 8 nodes, and a multiple of 16


@pytest.mark.parametrize("name", ["llama-grouped", "gpt2"])
def test_a_cache_grows_by_doubling_and_ends_at_the_context(name, monkeypatch):
    """A long limit costs nothing before the text is long."""
    monkeypatch.setattr("model.engine.loop.ROOM", 4)
    model, prompt = toy_model(name), [5, 6, 7, 8, 5, 6]
    target, capacities = Target(model), []
    allocate = TreeCache._allocate
    monkeypatch.setattr(
        TreeCache, "_allocate", lambda cache, capacity: (capacities.append(capacity), allocate(cache, capacity))
    )
    for method in ("recycling", "pld"):
        drafter = make_method(method, target, **({"tree": "best:12"} if method == "recycling" else {}))
        assert generate(target, drafter, prompt, max_new_tokens=1000).tokens == greedy(model, prompt, 250)
        target.caches._free.clear()
    assert len(capacities) == 2 * 5 and max(capacities) <= 256 + 12 + 16
    assert all(after == 2 * before for before, after in zip(capacities[:3], capacities[1:4], strict=True))
