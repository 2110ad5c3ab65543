"""Packed products: the same numbers as torch's own, only where they can be, and nowhere else."""

import copy

import psutil
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from evaluation.loading.models import random_model
from evaluation.loading.settings import ModelSettings
from model import tuning
from model.copying.pld import PromptLookup
from model.decoding import Target, generate, linear
from model.decoding.linear import SMALL_PRODUCT, PackedLinear, linear_bytes, pack_linears, packable
from model.errors import UserError
from model.tuning import choose_linear
from model.vanilla import Vanilla
from tests.conftest import greedy

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(not packable(CPU, torch.float32), reason="no x86 processor with oneDNN")


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 9, 81, 300])
def test_products_are_those_of_the_weight(rows, bias):
    torch.manual_seed(rows)
    layer = nn.Linear(257, 2050, bias=bias).requires_grad_(False)
    x = torch.randn(1, rows, 257)
    expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    pack_linears(layer)
    assert type(layer) is PackedLinear and x.numel() * 2050 >= SMALL_PRODUCT
    torch.testing.assert_close(layer(x), expected.float(), rtol=1e-5, atol=1e-5)


@needs_packing
def test_large_products_use_the_packed_weight_and_small_ones_the_stock_one():
    layer = nn.Linear(512, 512, bias=False).requires_grad_(False)
    pack_linears(layer)
    layer.product.packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(512, 512), 32)  # tells the two apart
    assert layer(torch.ones(2, 512)).eq(0).all(), "2 x 512 x 512 is not small"
    assert layer(torch.ones(1, 512)).ne(0).any()


@needs_packing
def test_gradients_and_compiled_code_use_the_stock_weight():
    layer = nn.Linear(512, 512)
    pack_linears(layer)
    x = torch.randn(8, 512, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(8, 512))


class _Attention(nn.Module):
    """Queries, keys and values of one tensor, an output of another; `again` calls a layer twice."""

    def __init__(self, *, bias: bool = False, again: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(96, width, bias=bias) for width in (96, 48, 48, 96))
        self.again = again
        self.requires_grad_(False)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(q + torch.cat((k, v), dim=-1)) + (self.q(x) if self.again else 0)


def _packed_attention(packed=True, **settings):
    module = _Attention(**settings)
    stock = copy.deepcopy(module)
    pack_linears(module, lambda: module(torch.ones(1, 1, 96)), packed=packed)
    return module, stock


@pytest.mark.parametrize("bias", [False, True])
def test_joint_products_are_torchs_own_of_layers_that_share_their_input(bias):
    module, stock = _packed_attention(packed=False, bias=bias)
    assert module.q.product is module.v.product and module.q.product.packed is None
    assert type(module.out) is nn.Linear, "a layer by itself stays as it is"
    for rows in (1, 9, 300):
        x = torch.randn(1, rows, 96)
        torch.testing.assert_close(module(x), stock(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_packing)])
def test_compiled_code_multiplies_once_for_layers_that_share_their_input(packed):
    products = []

    def count(graph, inputs):
        products.append(sum("linear" in str(node.target) for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    module, stock = _packed_attention(packed=packed)
    compiled = torch.compile(module, backend=count)
    for seed in range(3):
        x = torch.randn(1, 9, 96, generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            torch.testing.assert_close(compiled(x), stock(x), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(module(x), stock(x), rtol=1e-5, atol=1e-5)  # nothing is left from tracing
    assert products == [2], "queries, keys and values in one, and what is put out"
    torch._dynamo.reset()


def test_auto_joins_on_cuda(monkeypatch):
    monkeypatch.setattr(tuning, "packable", lambda device, dtype: False)
    embedding = type("E", (), {"weight": type("W", (), {"device": torch.device("cuda"), "dtype": torch.float16})})
    model = type("M", (), {"get_input_embeddings": lambda self: embedding, "parameters": lambda self: []})()
    assert choose_linear(model) == "fused"
    assert choose_linear(model, "torch") == "torch"
    assert choose_linear(model, sharded=True) == "torch"


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 9, 81])
def test_layers_given_one_tensor_are_one_product(rows, bias):
    torch.manual_seed(rows)
    module, stock = _packed_attention(bias=bias)
    assert module.q.product is module.k.product is module.v.product is not module.out.product
    for _ in range(3):  # a part of an earlier forward would show
        x = torch.randn(1, rows, 96)
        torch.testing.assert_close(module(x), stock(x), rtol=1e-5, atol=1e-5)
    module.load_state_dict(stock.state_dict())  # the weights are views, and still whole parameters
    assert module.k.weight.data_ptr() == module.k.product.weight[96:].data_ptr(), "the weight is held once"


@needs_packing
def test_parts_are_never_of_another_tensor():
    torch.manual_seed(0)
    module, stock = _packed_attention()
    x, y = torch.randn(2, 1, 5, 96)
    module.q(x)  # a forward that ended here, by Ctrl-C for one
    for layer, given in (("k", y), ("v", y), ("q", y), ("q", y), ("v", x), ("k", x), ("k", y)):
        expected = getattr(stock, layer)(given)
        torch.testing.assert_close(getattr(module, layer)(given), expected, rtol=1e-5, atol=1e-5)
    x.mul_(2)
    torch.testing.assert_close(module(x), stock(x), rtol=1e-5, atol=1e-5)


@needs_packing
def test_a_layer_that_is_called_twice_stays_by_itself():
    module, _ = _packed_attention(again=True)
    assert module.q.product is not module.k.product


@needs_packing
def test_an_engine_finds_what_a_models_layers_share():
    model = random_model("tiny", ModelSettings("x", "x", device="cpu", linear="onednn")).target.model
    layer = model.model.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    assert attention.q_proj.product is attention.k_proj.product is attention.v_proj.product
    assert mlp.gate_proj.product is mlp.up_proj.product
    products = {id(p.product) for p in model.modules() if isinstance(p, PackedLinear)}
    assert len(products) == 4 * model.config.num_hidden_layers + 1


@needs_packing
def test_only_plain_linear_layers_are_packed():
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Embedding(4, 4))
    assert linear_bytes(module) == 4 * 4 * 4
    pack_linears(module)
    assert [type(layer) for layer in module] == [PackedLinear, Own, nn.Embedding]


@needs_packing
def test_a_packed_model_gives_the_stock_models_own_text():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=384
    )
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    packed = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    packed.load_state_dict(stock.state_dict())
    target = Target(packed, context=256, linear="onednn")
    prompt = torch.randint(3, 4096, (12,)).tolist() * 2
    for drafter in (Vanilla(CPU), PromptLookup(device=CPU)):
        assert generate(target, drafter, prompt, max_new_tokens=60).tokens == greedy(stock, prompt, 60)


@pytest.mark.skipif(not packable(CPU, torch.bfloat16), reason="no x86 processor for which oneDNN has bfloat16")
@pytest.mark.parametrize("rows", [1, 9, 81])
def test_bfloat16_products_are_those_of_the_weight(rows):
    torch.manual_seed(rows)
    layer = nn.Linear(1024, 2048, bias=True, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(rows, 1024).bfloat16()
    expected = x.double() @ layer.weight.double().T + layer.bias.double()
    pack_linears(layer)
    torch.testing.assert_close(layer(x).double(), expected, rtol=2**-7, atol=2**-8)


def test_packing_is_for_a_cpu(monkeypatch):
    monkeypatch.setattr(linear, "packable", lambda device, dtype: device.type == "cpu" and dtype == torch.float32)
    monkeypatch.setattr(tuning, "packable", linear.packable)
    assert not packable(torch.device("cuda"), torch.float32) and not packable(CPU, torch.float16)
    with pytest.raises(UserError, match=r"linear=onednn: is for one x86 processor.*bfloat16"):
        random_model("tiny", ModelSettings("x", "x", device="cpu", dtype="bfloat16", linear="onednn"))
    with pytest.raises(UserError, match=r"model.linear=quick: use one of auto, onednn, fused, torch"):
        random_model("tiny", ModelSettings("x", "x", device="cpu", linear="quick"))


@needs_packing
def test_auto_packs_where_memory_allows(monkeypatch):
    settings = ModelSettings("x", "x", device="cpu")
    assert random_model("tiny", settings).target.linear == "onednn"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Free", (), {"available": 1000})())
    assert random_model("tiny", settings).target.linear == "torch"
    assert random_model("tiny", ModelSettings("x", "x", device="cpu", linear="onednn")).target.linear == "onednn"


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_packing)])
def test_stock_products_for_a_while(packed):
    """Within the block the layers are torch's own, to the last bit; behind it they are packed again."""
    module, stock = _packed_attention(packed=packed)
    x = torch.randn(1, 9, 96, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = module(x)
        with pytest.raises(KeyError), linear.stock_linears(module):
            assert torch.equal(module(x), stock(x))
            raise KeyError
        assert torch.equal(module(x), before)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_packing)])
@pytest.mark.parametrize("change", ["trained", "loaded", "cast", "copied"])
def test_a_weight_that_changed_is_the_one_that_counts(packed, change):
    """What was packed of it is old; packed again it is the new one."""
    module, stock = _packed_attention(packed=packed)
    x = torch.randn(1, 300, 96, generator=torch.Generator().manual_seed(0))
    if change == "trained":
        with torch.no_grad():
            for own in (module, stock):
                own.q.weight.mul_(2.0)
    elif change == "loaded":
        other = {name: tensor + 1.0 for name, tensor in stock.state_dict().items()}
        module.load_state_dict(other), stock.load_state_dict(other)
    elif change == "cast":
        module, stock, x = module.double(), stock.double(), x.double()
    else:
        module = copy.deepcopy(module)
        with torch.no_grad():
            module.q.weight.mul_(2.0), stock.q.weight.mul_(2.0)
    with torch.inference_mode():
        torch.testing.assert_close(module(x), stock(x), rtol=1e-5, atol=1e-5)
    if change != "cast":
        pack_linears(module, lambda: module(torch.ones(1, 1, 96)), packed=packed)
        with torch.inference_mode():
            torch.testing.assert_close(module(x), stock(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_packing)])
def test_parameters_stay_the_owners_own(packed):
    """An optimizer that was made before goes on training them, with gradients, packed or unpacked again."""
    module = _Attention().requires_grad_(True)
    parameters = list(module.parameters())
    pack_linears(module, lambda: module(torch.ones(1, 1, 96)), packed=packed)
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    module(torch.ones(1, 3, 96)).sum().backward()  # whose input needs no gradient
    assert any(parameter.grad is not None for parameter in parameters)
    linear.unpack_linears(module)
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == len(parameters)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_packing)])
def test_autocast_is_torchs_own(packed):
    module, stock = _packed_attention(packed=packed)
    x = torch.randn(1, 300, 96, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x), stock(x))
