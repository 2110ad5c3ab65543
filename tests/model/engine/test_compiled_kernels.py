"""Compiled norms and rotary embedding: the same logits, few compilations, a model that is left as it was found."""

import contextlib
import copy
import shutil
import threading
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from model.engine import Target, generate
from model.engine.kernels import CompiledKernels
from model.recycling import TokenRecycling, build_template
from tests.conftest import greedy, toy_model
from tests.model.engine.fake_graphs import FakeGraphs

SIZES = (13, 1, 2, 8, 24, 32, 81)  # of the trial first, then those of plain decoding and of trees


@pytest.fixture
def compiled():
    """A backend of torch.compile that compiles nothing and notes each graph that it is given."""
    torch._dynamo.reset()
    calls = []

    def backend(graph, inputs, options):
        calls.append(graph)
        return graph.forward

    backend.calls = calls
    yield backend
    torch._dynamo.reset()


def forwarded(target, n, kernels=None):
    """Logits (n, V) of a step of fixed shape."""
    with torch.inference_mode(), target.cache(96) as cache, kernels or contextlib.nullcontext():
        mask, at = torch.zeros(n, 128, dtype=target.dtype), torch.arange(n)
        return target.forward_static(cache, at % 61, mask, at, at).logits


class Operators(TorchDispatchMode):
    """How many operators write a tensor, in place or a new one; views and allocations do not."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given, output = addresses((args, kwargs)), func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.count += name.endswith("_") or (bool(addresses(output) - given) and not name.startswith("empty"))
        return output


def addresses(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(tensors) if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize("rows", [1, 81])
@pytest.mark.parametrize(("kind", "plain", "norms"), [("llama", 42, 2), ("qwen3", 58, 4)])
def test_a_layer_has_half_as_many_operators_or_fewer(kind, plain, norms, rows, monkeypatch):
    """What is compiled counts as one: of a norm's 8 operators and of the embedding's 10."""
    target, counted = Target(toy_model(kind, dtype=torch.float16)), []

    def compiled(own, **how):
        def once(*args):
            with _disable_current_modes():
                output = own(*args)
            operators.count += 1
            return output

        return once

    monkeypatch.setattr(torch, "compile", compiled)
    target.reserve(96)
    for kernels in (None, CompiledKernels(target.model)):
        with Operators() as operators:
            forwarded(target, rows, kernels)
        counted.append(operators.count)
    layers = target.model.config.num_hidden_layers
    assert layers * plain < counted[0] < layers * (plain + 4) + 24, "and those of the whole forward"
    assert counted[0] - counted[1] == layers * (7 * norms + 9) + 7, "the last norm's, too"


@pytest.mark.parametrize(("kind", "compilations"), [("llama", 4), ("llama-grouped", 4), ("qwen3", 6), ("gpt2", 0)])
def test_a_few_compilations_serve_all_layers_and_sizes(kind, compilations, compiled):
    """One of each for one row, and one for any other number; Qwen 3 has norms of two shapes."""
    model = toy_model(kind)
    target, kernels = Target(model), CompiledKernels(model, compiled)
    for n in SIZES:
        assert torch.equal(forwarded(target, n, kernels), forwarded(target, n))
        assert len(compiled.calls) == (compilations // 2 if n == SIZES[0] else compilations)
    assert bool(kernels.names) == bool(compilations)


def test_norms_of_a_sixth_width_are_compiled_too(compiled):
    """Of dynamo's own eight compilations of a function each width takes two."""
    for width in range(1, 7):
        kernels = CompiledKernels(norm := LlamaRMSNorm(8 * width), compiled)
        with torch.inference_mode(), kernels:
            norm.forward(torch.ones(1, 1, 8 * width)), norm.forward(torch.ones(1, 3, 8 * width))
        assert len(compiled.calls) == 2 * width


def test_captured_steps_call_them_and_nobody_else_does(compiled, monkeypatch):
    """While a step is made, another thread's forward and what comes after it find the model's own."""
    model, graphs, seen = toy_model("llama"), FakeGraphs(monkeypatch), []
    own, target = modeling_llama.apply_rotary_pos_emb, graphs.target(model)
    norms = [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]
    target.kernels = CompiledKernels(model, compiled)
    run = Target._run_model

    def watched(target, *args, **kwargs):
        swapped = modeling_llama.apply_rotary_pos_emb is not own
        seen.append((swapped, *("forward" in vars(norm) for norm in norms)))
        if swapped and len(seen) < 6:
            before = len(compiled.calls)
            other = threading.Thread(target=lambda: model(torch.tensor([[5, 6, 7]])))
            other.start()
            other.join()
            assert len(compiled.calls) == before
        return run(target, *args, **kwargs)

    monkeypatch.setattr(Target, "_run_model", watched)
    drafter = TokenRecycling(61, build_template("best", nodes=9))
    out = generate(target, drafter, [5, 6, 7], max_new_tokens=30, execution="graph")
    assert out.tokens == greedy(model, [5, 6, 7], 30)
    assert set(seen) == {(False,) * 6, (True,) * 6}, "of the prompt, and of captured steps"
    assert modeling_llama.apply_rotary_pos_emb is own and not any("forward" in vars(norm) for norm in norms)
    assert compiled.calls and type(copy.deepcopy(target.kernels)).__name__ == "nullcontext"


def test_what_the_compiler_says_of_our_functions_reaches_no_user():
    """On a GPU seven lines "Online softmax is disabled on the fly" came before the first answer."""
    torch._dynamo.reset()
    softmax = "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction."

    def backend(graph, inputs, options=None):
        warnings.warn(softmax, stacklevel=1)
        warnings.warn_explicit("TF32 is off", UserWarning, "compile_fx.py", 1, module="torch._inductor.compile_fx")
        warnings.warn("the user's", stacklevel=1)
        return graph.forward

    model = toy_model("llama")
    target, kernels = Target(model), CompiledKernels(model, backend)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with kernels:
            forwarded(target, 13, kernels)
        assert {str(one.message) for one in told} == {"the user's"} and list(warnings.filters) == before
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert [str(one.message) for one in told][-3:] == [softmax, "TF32 is off", "the user's"], (
        "of the user's own functions"
    )
    torch._dynamo.reset()


def test_an_error_inside_leaves_the_model_as_it_was(compiled):
    model, own = toy_model("llama"), modeling_llama.apply_rotary_pos_emb
    with pytest.raises(RuntimeError), CompiledKernels(model, compiled):
        model.lm_head(torch.zeros(1, 3))
    assert modeling_llama.apply_rotary_pos_emb is own
    assert not any("forward" in vars(module) for module in model.modules())


def test_entered_twice_by_a_thread_it_leaves_the_model_as_it_was(compiled):
    """As where a hook inside a captured step decodes with the same model."""
    model, own = toy_model("llama"), modeling_llama.apply_rotary_pos_emb
    kernels = CompiledKernels(model, compiled)
    with kernels, kernels:
        assert modeling_llama.apply_rotary_pos_emb is not own
    assert modeling_llama.apply_rotary_pos_emb is own
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("kind", ["llama-grouped", "qwen3"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.0), (torch.float32, 1e-5)])
def test_inductor_rounds_as_eager_steps_do(kind, dtype, most):
    """In half precision to the last bit."""
    torch._dynamo.reset()
    model = toy_model(kind, dtype=dtype)
    target, kernels = Target(model), CompiledKernels(model)
    for n in (13, 1, 81):
        plain = forwarded(target, n)
        assert float((forwarded(target, n, kernels) - plain).abs().max() / plain.abs().max()) <= most
