"""Attention by a table and of heads that share keys: sdpa's numbers; what it is not made for stays sdpa's."""

import contextlib
import random

import numpy as np
import pytest
import torch

from model.decoder import Decoder
from model.engine import Draft, Target, attention, decode, devices
from model.engine import target as engine_target
from model.engine.attention import TreeAttention
from model.engine.sight import Sight, additive, fill_table
from model.errors import UserError
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model
from tests.model.sessions import each_session


@pytest.mark.parametrize("kind", ["llama-grouped", "qwen2", "qwen3", "gemma", "mistral"])
@torch.inference_mode()
def test_logits_are_those_of_sdpa_to_the_last_bit(kind, monkeypatch):
    model, rng = toy_model(kind), random.Random(5)
    target, tree = Target(model), build_template("best", nodes=12)
    calls, own = [], TreeAttention.__call__
    monkeypatch.setattr(
        TreeAttention, "__call__", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)
    )
    prompt = [rng.randrange(3, 61) for _ in range(30)]
    draft = Draft(tree, torch.tensor([rng.randrange(3, 61) for _ in range(13)]))
    found = {}
    for name in ("ours", "sdpa"):
        if name == "sdpa":
            target._attending.by = lambda mask: contextlib.nullcontext()
        with target.cache(13) as cache:
            target.prefill(cache, prompt)
            found[name] = target.forward(cache, draft).logits
    assert len(calls) == 2 * model.config.num_hidden_layers, (
        "a prefill and a forward of the first alone"
    )
    assert torch.equal(found["ours"], found["sdpa"])


@pytest.mark.parametrize("execution", ["eager", "static"])
def test_a_model_is_left_as_it_was_found(execution):
    """Its owner may move it, and its forwards between two steps are transformers' own."""
    model, prompt = toy_model("llama-grouped"), [5, 6, 7]
    target = Target(model)
    drafter = TokenRecycling(61, build_template("2.2.2"))
    for _ in decode(target, drafter.session(), prompt, max_new_tokens=10, execution=execution):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(UserError, match="max_new_tokens"):
        Decoder(model).generate(prompt, max_new_tokens=0)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("before", [True, False])
def test_cudnns_attention_is_off_during_our_forwards_alone(before, monkeypatch):
    """Those of a drafter's own network, too, as EAGLE's head; and stays as its user wants it."""
    model, seen, enabled = toy_model("llama"), [], torch.backends.cuda.cudnn_sdp_enabled
    target, default = Target(model), enabled()
    drafter, cuda = Vanilla(target.device), devices.without_cudnn(torch.device("cuda"))
    for module in (attention, engine_target):
        monkeypatch.setattr(module, "without_cudnn", lambda device: cuda)

    def watch(session):
        draft = session.draft
        session.draft = lambda root: seen.append(enabled()) or draft(root)

    each_session(drafter, watch)
    model.model.layers[0].register_forward_pre_hook(lambda *given: seen.append(enabled()))
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        for _ in decode(target, drafter.session(), [5, 6, 7], max_new_tokens=5):
            assert enabled() == before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(default)
    assert len(seen) == 5 + 4 and not any(seen)


def test_what_is_not_on_a_cpu_or_changes_the_scores_goes_to_sdpa():
    """Layers may be spread over devices."""
    grouped, seen = TreeAttention(), []
    grouped._sdpa = lambda *args, **kwargs: seen.append(args) or (args[1], None)
    query, shared = torch.empty(1, 4, 3, 8, device="meta"), torch.empty(1, 2, 5, 8, device="meta")
    grouped(torch.nn.Module(), query, shared, shared, torch.zeros(1, 1, 3, 5, device="meta"))
    assert len(seen) == 1
    query, shared = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    grouped(torch.nn.Module(), query, shared, shared, torch.zeros(1, 1, 3, 5), softcap=30.0)
    assert len(seen) == 2
    grouped(torch.nn.Module(), query, shared, shared, torch.zeros(1, 1, 3, 5))
    assert len(seen) == 2, "it computes this one itself"


def table_of(nodes, length):
    table = np.zeros((nodes, Sight.width(nodes)), dtype=np.int64)
    fill_table(table, [np.tri(nodes, dtype=bool)], [(0, length)])
    return Sight(torch.from_numpy(table), 1).as_mask


def test_models_of_one_config_attend_by_tables():
    """The first to leave took the table's attention from the other."""
    model = toy_model("llama-grouped")
    one, other = Target(model), Target(type(model)(model.config).eval())
    leaves, stays = other._attending.by(None), one._attending.by(table_of(1, 3))
    leaves.__enter__()
    stays.__enter__()
    leaves.__exit__(None, None, None)
    assert vars(model.config)[attention.SETTING] == attention.NAME
    assert Target(model).attends_by_table
    stays.__exit__(None, None, None)
    assert vars(model.config)[attention.SETTING] == "sdpa"


def test_a_table_says_what_masks_say():
    """Rows of nobody see themselves and what is committed; sdpa gets a mask for what changes scores."""
    tree, chain = build_template("best", nodes=70).host_ancestors.numpy(), np.tri(3, dtype=bool)
    stretches, n = [(200, 9), (0, 30)], 80
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
    query, key, value = (
        torch.randn(1, 4, n, 8),
        torch.randn(1, 2, 300, 8),
        torch.randn(1, 2, 300, 8),
    )
    module, ours = torch.nn.Module(), TreeAttention()
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
