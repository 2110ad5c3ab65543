"""Layers compiled whole: the same logits, few compilations, a model that is left as it was found."""

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from model.devices import RefusesHostReads
from model.engine import Target, generate
from model.engine.attention.sight import Sight, fill_table
from model.engine.graphs.compiled_layers import CompiledLayers
from model.recycling import TokenRecycling, build_template
from tests.conftest import greedy, toy_model
from tests.model.engine.fake_graphs import FakeGraphs

SIZES = (13, 1, 2, 81)  # of the trial first, then those of plain decoding and of trees


@pytest.fixture
def compiled():
    """A backend of torch.compile that compiles nothing and notes each graph that it is given."""
    torch._dynamo.reset()
    calls = []

    def backend(graph, inputs, options=None):
        calls.append(graph)
        return graph.forward

    backend.calls = calls
    yield backend
    torch._dynamo.reset()


def forwarded(target, n, kernels=None, past=20):
    """Logits (n, V) of a step of fixed shape: a chain after a prompt."""
    table = np.zeros((n, Sight.width(n)), dtype=np.int64)
    fill_table(table, [np.tri(n, dtype=bool)], [(0, past)])
    at = torch.arange(past, past + n)
    target.kernels = kernels or contextlib.nullcontext()
    with torch.inference_mode(), target.cache(96) as cache:
        target.prefill(cache, list(range(3, past + 4)))
        return target.forward_static(
            cache, at % 61, at, at, Sight(torch.from_numpy(table), 1), 128
        ).logits


def products(graph):
    return sum(
        node.target in (torch._C._nn.linear, torch.nn.functional.linear)
        for node in graph.graph.nodes
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-grouped", "phi3"])
def test_two_compilations_serve_all_layers_and_sizes(kind, compiled):
    """One for one row and one for any other number, of a layer and of the last norm; fused products are one product.

    Compiling goes on after a step that refuses host reads, past a limit of compilations in all, and with a cache that
    `reserve` made.
    """
    target = Target(toy_model(kind), linear="fused")
    kernels = CompiledLayers(target, compiled)
    with torch.inference_mode(), RefusesHostReads():
        forwarded(target, 13, kernels)
    assert not compiled.calls
    with torch._dynamo.config.patch(accumulated_recompile_limit=1):
        for n in SIZES:
            assert torch.allclose(forwarded(target, n, kernels), forwarded(target, n), atol=1e-5)
    target.caches.drop()
    target.reserve(96)
    for n in (1, 13):
        forwarded(target, n, kernels)
    assert [products(graph) for graph in compiled.calls] == [4, 0, 4, 0]


def swapped(model):
    return ["forward" in vars(layer) for layer in (*model.model.layers, model.model.norm)]


def test_captured_steps_call_them_and_nobody_else_does(compiled, monkeypatch):
    """While a step is made, another thread's forward and what comes after it find the model's own."""
    model = toy_model("llama")
    seen = []
    target = FakeGraphs(monkeypatch).target(model)
    target.kernels = CompiledLayers(target, compiled)
    run = Target._run_model

    def watched(target, *args, **kwargs):
        seen.append(set(swapped(model)))
        if seen[-1] == {True} and len(seen) < 6:
            before = len(compiled.calls)
            with ThreadPoolExecutor(1) as other:
                other.submit(torch.no_grad()(model), torch.tensor([[5, 6, 7]])).result()
            assert len(compiled.calls) == before
        return run(target, *args, **kwargs)

    monkeypatch.setattr(Target, "_run_model", watched)
    drafter = TokenRecycling(61, build_template("best", nodes=9))
    out = generate(target, drafter, [5, 6, 7], max_new_tokens=12, execution="graph")
    assert out.tokens == greedy(model, [5, 6, 7], 12)
    assert {False} in seen and {True} in seen and {False, True} not in seen
    assert not any(swapped(model))
    with pytest.raises(RuntimeError), target.kernels:
        model.lm_head(torch.zeros(1, 3))
    assert not any(swapped(model)), "also after an error"


def test_a_layers_own_forward_and_a_layer_that_left_its_product_count(compiled):
    """What somebody put into a layer was not called, and keys were multiplied by the weight of queries."""
    model = toy_model("llama-grouped")
    target = Target(model, linear="fused")
    own = model.model.layers[0].forward
    projection = model.model.layers[1].self_attn.q_proj
    projection.weight = torch.nn.Parameter(2 * projection.weight.detach())
    model.model.layers[0].forward = lambda states, **more: own(states, **more) * 3
    assert torch.allclose(
        forwarded(target, 13, CompiledLayers(target, compiled)), forwarded(target, 13), atol=1e-5
    )
    assert not any(swapped(model)[1:])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("kind", "dtype", "most"),
    [("llama-grouped", torch.float32, 1e-5), ("qwen3", torch.bfloat16, 0.0)],
)
def test_inductor_rounds_as_eager_steps_do(kind, dtype, most):
    """In half precision to the last bit."""
    torch._dynamo.reset()
    target = Target(toy_model(kind, dtype=dtype))
    kernels = CompiledLayers(target)
    for n in (13, 1):
        plain = forwarded(target, n)
        assert (
            float((forwarded(target, n, kernels) - plain).abs().max() / plain.abs().max()) <= most
        )
