"""Heads that share keys: the same numbers as transformers' sdpa, and whatever it is not made for stays sdpa's."""

import contextlib
import random

import pytest
import torch

from model.decoder import Decoder
from model.engine import Draft, Target, decode, devices, kernels
from model.engine import target as engine_target
from model.engine.kernels import SDPA_GROUPED, GroupedAttention
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
    calls, own = [], GroupedAttention.__call__
    monkeypatch.setattr(GroupedAttention, "__call__", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    prompt = [rng.randrange(3, 61) for _ in range(30)]
    draft = Draft(tree, torch.tensor([rng.randrange(3, 61) for _ in range(13)]))
    found = {}
    for name in (SDPA_GROUPED, "sdpa"):
        if name == "sdpa":
            target._grouped = contextlib.nullcontext()
        with target.cache(13) as cache:
            target.prefill(cache, prompt)
            found[name] = target.forward(cache, draft).logits
    assert len(calls) == 2 * model.config.num_hidden_layers, "a prefill and a forward of the first alone"
    assert torch.equal(found[SDPA_GROUPED], found["sdpa"])


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
    for module in (kernels, engine_target):
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


def test_cudnns_attention_stays_off_while_any_thread_is_inside():
    """One that leaves first would switch it on in the middle of another one's forward."""
    one, other = (devices.without_cudnn(torch.device("cuda")) for _ in range(2))
    one.__enter__()
    other.__enter__()
    one.__exit__()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    other.__exit__()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_what_is_not_on_a_cpu_or_changes_the_scores_goes_to_sdpa():
    """Layers may be spread over devices."""
    grouped, seen = GroupedAttention(), []
    grouped._sdpa = lambda *args, **kwargs: seen.append(args) or (args[1], None)
    query, shared = torch.empty(1, 4, 3, 8, device="meta"), torch.empty(1, 2, 5, 8, device="meta")
    grouped(torch.nn.Module(), query, shared, shared, torch.zeros(1, 1, 3, 5, device="meta"))
    assert len(seen) == 1
    query, shared = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    grouped(torch.nn.Module(), query, shared, shared, torch.zeros(1, 1, 3, 5), softcap=30.0)
    assert len(seen) == 2
    grouped(torch.nn.Module(), query, shared, shared, torch.zeros(1, 1, 3, 5))
    assert len(seen) == 2, "it computes this one itself"
