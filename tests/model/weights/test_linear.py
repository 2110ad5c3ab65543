"""Packed and fused products: the same numbers as torch's own, only where they can be, and nowhere else."""

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_model
from torch import nn
from torch.nn.utils import prune

from model.weights import linear
from model.weights.linear import Copies, copies_of, halves, packable, unpack_linears

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not packable(CPU, torch.float32), reason="no x86 processor with oneDNN"
)
needs_half = pytest.mark.skipif(not halves(), reason="no x86 processor with FBGEMM")


def packed(module, how="onednn") -> Copies:
    """The module's copies, packed as a target does it."""
    copies = copies_of(module, how)
    copies.refresh(module)
    return copies


@pytest.mark.parametrize("rows, bias", [(1, False), (9, True), (300, True)])
@pytest.mark.parametrize(
    ("how", "values", "scale"),
    [
        pytest.param("onednn", "float32", 1.0, marks=needs_packing),
        pytest.param("half", "float16", 1.0, marks=needs_half),
        pytest.param("half", "bfloat16", 1e-7, marks=needs_half),
        pytest.param("half", "bfloat16", 1e7, marks=needs_half),
    ],
)
@torch.inference_mode()
def test_products_are_those_of_the_weight(how, values, scale, rows, bias):
    """Also of 16 bits: float16's numbers, or bfloat16's of any size."""
    torch.manual_seed(rows)
    layer = nn.Linear(257, 2050, bias=bias)
    for parameter in layer.parameters():
        parameter.data = (parameter * scale).to(getattr(torch, values))
        if values == "bfloat16":
            parameter.data = parameter.float()
    x = torch.randn(1, rows, 257).to(layer.weight.dtype)
    expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    copies = packed(layer, how)
    assert copies.by_layer[layer].kind == how
    assert copies.by_layer[layer].serves(x, layer.weight, layer.bias)
    with copies.used():
        out = layer(x)
    rounding = 1e-3 if out.dtype is torch.float16 else 1e-5
    error = rounding * expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=error)


@needs_half
def test_what_fits_in_16_bits():
    """The powers of two between are float16's; a value far below the greatest may lose bits that no sum has."""

    def exponent(*rows):
        return linear._exponent(torch.tensor(rows))

    assert exponent([1.0, 0.5, -3.0, 0.0]) == 0
    assert exponent([1.0, 2**-20 * 1.0078125]) == 14, "float16's small numbers are coarse"
    assert exponent([2.0**20]) == -6 and exponent([0.0, 0.0]) == 0
    assert exponent([1.0, (1 + 2**-10) * 2**-31]) is not None
    assert exponent([1.0, 0.0], [(1 + 2**-10) * 2**-31, 0.0]) is None, (
        "the greatest is of another row"
    )
    for no in ([1e6], [1.0, 1 + 2**-12], [1.0, float("nan")], [float("inf")], []):
        assert exponent(no) is None, no
    assert exponent([1, 2]) is None


@needs_packing
def test_large_products_use_the_packed_weight_and_all_others_the_layers_own():
    layer = nn.Linear(512, 256, bias=False)
    copies = packed(layer)
    # tells the two apart
    zeros = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(256, 512), 32)
    copies.by_layer[layer].packed = zeros
    with torch.no_grad(), copies.used():
        assert layer(torch.ones(2, 512)).eq(0).all(), "2 x 512 x 256 is not small"
        assert layer(torch.ones(1, 512)).ne(0).any()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(torch.ones(2, 512)).ne(0).any()
        with copies_of(layer, "torch").used():
            assert layer(torch.ones(2, 512)).ne(0).any(), "another target's forward"
    with torch.no_grad():
        assert layer(torch.ones(2, 512)).ne(0).any(), "its owner's forward"
    with copies.used():
        assert layer(torch.ones(2, 512)).ne(0).any(), "gradients"


class _Attention(nn.Module):
    """Queries, keys and values of one tensor, an output of another."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (
            nn.Linear(96, width, bias=bias) for width in (96, 48, 48, 96)
        )

    def forward(self, x):
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        return self.out(q + torch.cat((k, v), dim=-1))


# as a target holds them
COPIES: weakref.WeakKeyDictionary[nn.Module, Copies] = weakref.WeakKeyDictionary()


def change_layout(module, how):
    """Pack or fuse a module's layers; fused ones are found under the mode of the caller."""
    COPIES[module] = packed(module, how)
    if how == "fused":
        with torch.no_grad():
            COPIES[module].fuse(module, lambda: module(torch.ones(1, 1, 96)))


def ours(module, x):
    """A forward as a target runs it."""
    with COPIES[module].used() if module in COPIES else nullcontext():
        return module(x)


def _attention(how, **settings):
    """The module with packed or fused layers, and a stock copy."""
    module = _Attention(**settings)
    if how == "half":
        module.half().float()
    stock = copy.deepcopy(module)
    change_layout(module, how)
    return module, stock


def _input(rows=300):
    return torch.randn(1, rows, 96, generator=torch.Generator().manual_seed(rows))


def _same(module, stock, x):
    with torch.inference_mode():
        torch.testing.assert_close(ours(module, x), stock(x), rtol=1e-5, atol=1e-5)
        assert torch.equal(module(x), stock(x)), "its owner's forward"


ALL = pytest.mark.parametrize(
    "how",
    ["fused", pytest.param("onednn", marks=needs_packing), pytest.param("half", marks=needs_half)],
)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_given_one_tensor_are_one_product(bias):
    module, stock = _attention("fused", bias=bias)
    parts = COPIES[module].by_layer
    assert parts[module.q].fused is parts[module.k].fused is parts[module.v].fused
    assert type(module.out) is nn.Linear, "a layer by itself stays as it is"
    for rows in (1, 9, 9, 300):  # a part of an earlier forward would show
        _same(module, stock, _input(rows))
    module.load_state_dict(stock.state_dict())  # the weights are views, and still whole parameters
    assert module.k.weight.data_ptr() == parts[module.k].fused.weight[96:].data_ptr(), (
        "the weight is held once"
    )


@torch.inference_mode()
def test_parts_are_never_of_another_tensor():
    torch.manual_seed(0)
    module, stock = _attention("fused")
    x, y = torch.randn(2, 1, 5, 96)
    with COPIES[module].used():
        module.q(x)  # a forward that ended here, by Ctrl-C for one
        for layer, given in (("k", y), ("v", y), ("q", y), ("q", y), ("v", x), ("k", x), ("k", y)):
            expected = getattr(stock, layer)(given)
            torch.testing.assert_close(
                getattr(module, layer)(given), expected, rtol=1e-5, atol=1e-5
            )
    x.mul_(2)
    _same(module, stock, x)


@ALL
def test_stock_products_for_a_while(how):
    """Within the block the layers are torch's own, to the last bit; behind it they are packed or fused again."""
    module, stock = _attention(how)
    with torch.inference_mode():
        before = ours(module, _input())
        with pytest.raises(KeyError), linear.stock_linears(module):
            assert {type(layer) for layer in module.children()} == {nn.Linear}
            assert torch.equal(ours(module, _input()), stock(_input()))
            raise KeyError
        assert torch.equal(ours(module, _input()), before) and COPIES[module].kind == how


def _trained(module):
    with torch.no_grad():
        module.q.weight.mul_(2.0)


def _assigned(module):
    module.load_state_dict(
        {name: 2.0 * tensor for name, tensor in module.state_dict().items()}, assign=True
    )


class _Own(nn.Parameter):
    """As libraries of quantisation have them."""


def _of_another_class(module):
    module.q.weight = _Own(2.0 * module.q.weight.detach())


CHANGES = {
    "assigned": _assigned,
    "trained": _trained,
    "weight of another class": _of_another_class,
    "pruned": lambda module: prune.l1_unstructured(module.q, "weight", 0.5),
}


@ALL
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_changed_are_those_that_count(how, change):
    module, stock = _attention(how, bias=True)
    for own in (module, stock):
        CHANGES[change](own)
    if how == "fused":  # packed copies are made anew at the next answer
        _same(module, stock, _input())
    change_layout(module, how)
    _same(module, stock, _input())


@ALL
def test_parameters_stay_the_owners_own(how, tmp_path):
    """An optimizer that was made before goes on training them, packed or unpacked again."""
    module = _Attention(bias=True)
    parameters = list(module.parameters())
    with torch.inference_mode():
        change_layout(module, how)
    module(_input()).sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)
    torch.save(module, tmp_path / "model.pt")
    _same(torch.load(tmp_path / "model.pt", weights_only=False), module, _input())
    unpack_linears(module)
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    assert {type(layer) for layer in module.children()} == {nn.Linear}
    save_model(module, tmp_path / "model.safetensors")  # no two share a storage
