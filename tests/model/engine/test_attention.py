"""Attention by a table and of heads that share keys: sdpa's numbers; what it is not made for stays sdpa's."""

import contextlib
import random

import numpy as np
import pytest
import torch

from model.devices import without_cudnn
from model.engine import Draft, Target
from model.engine.attention import attention
from model.engine.attention.attention import TreeAttention
from model.engine.attention.sight import Sight, additive, fill_table
from model.recycling import build_template
from tests.conftest import toy_model


@pytest.mark.parametrize("kind", ["llama-grouped", "gemma"])
@torch.inference_mode()
def test_logits_are_those_of_sdpa_to_the_last_bit(kind):
    rng = random.Random(5)
    target = Target(toy_model(kind))
    tree = build_template("best", nodes=12)
    prompt = [rng.randrange(3, 61) for _ in range(30)]
    draft = Draft(tree, torch.tensor([rng.randrange(3, 61) for _ in range(13)]))
    found = {}
    for name in ("ours", "sdpa"):
        if name == "sdpa":
            target._attending.by = lambda mask: contextlib.nullcontext()
        with target.cache(13) as cache:
            target.prefill(cache, prompt)
            found[name] = target.forward(cache, draft).logits
    assert torch.equal(found["ours"], found["sdpa"])


def test_a_table_says_what_masks_say():
    """Rows of nobody see themselves and what is committed; sdpa gets a mask for what changes scores."""
    tree = build_template("best", nodes=70).host_ancestors.numpy()
    chain = np.tri(3, dtype=bool)
    stretches = [(200, 9), (0, 30)]
    n = 80
    table = np.zeros((n, Sight.width(n)), dtype=np.int64)
    fill_table(table, [tree, chain], stretches)
    expected = np.zeros((n, 300), dtype=bool)
    expected[:71, 200:209] = expected[71:, :30] = True
    expected[:71, 209:280] = tree
    expected[71:74, 30:33] = chain
    expected[range(74, n), range(33, 39)] = True
    sight = Sight(torch.from_numpy(table), 2)
    assert sight.seen(300)[0].numpy().tolist() == expected.tolist()
    torch.manual_seed(0)
    query = torch.randn(1, 4, n, 8)
    key, value = torch.randn(2, 1, 2, 300, 8)
    ours = TreeAttention()
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    mask = additive(torch.from_numpy(expected), torch.float32)[None, None]
    plain = ours._sdpa(module, query, key, value, mask, scaling=0.3)[0]
    assert torch.allclose(
        ours(module, query, key, value, sight.as_mask, scaling=0.3)[0], plain, atol=1e-6
    )
    by_operator = attention.attend_by_table(query, key, value, *sight, 0.3)
    assert torch.allclose(by_operator, plain, atol=1e-6)
    bias = torch.randn(1, 4, n, 300)
    biased = ours(module, query, key, value, sight.as_mask, scaling=0.3, position_bias=bias)[0]
    assert torch.allclose(
        biased, ours._sdpa(module, query, key, value, mask + bias, scaling=0.3)[0], atol=1e-5
    )


def test_cudnn_is_as_it_was_after_two_threads_turned_it_off():
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    first, second = (without_cudnn(torch.device("cuda")) for _ in range(2))
    try:
        for step, on in (
            (first.__enter__, False),
            (second.__enter__, False),
            (lambda: first.__exit__(None, None, None), False),
            (lambda: second.__exit__(None, None, None), True),
        ):
            step()
            assert torch.backends.cuda.cudnn_sdp_enabled() == on
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)
