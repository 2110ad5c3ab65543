"""Products of a few rows on a CPU: weights packed once in oneDNN's layout, layers of one input in one product.

A draft tree adds rows to each product with a weight; drafting pays if these rows are cheap. In float32 torch
multiplies by MKL, whose small products are slow on a processor that is not Intel's. On an AMD EPYC (two threads),
microseconds for 1, 9 and 81 rows: 192 x 2048 25, 101, 377 by MKL and 21, 32, 151 packed; 4096 x 4096 2771, 7301 and
1281, 1570 (1 and 9 rows). A packed call costs some 16 us before it multiplies, so layers that are given the same tensor
(queries, keys and values; gate and up) are one call. bfloat16 gains, too: even on an
Intel Xeon that emulates it 4096 x 4096 takes 1702 and 8733 (1 and 9 rows) and not 2758 and 10776, though in float32 it
takes 4679 and 4366. Other types, devices and architectures keep torch's own products, layers of one input in one where
that is asked for: fewer launches on a GPU. Compiled code has that, too: the embedded model's compiled step takes 0.90
of one with a product a layer at one row, and 0.94 at 25 (two shared cores, over eager steps of the same minute).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

SMALL_PRODUCT = 1 << 19  # multiplications below which the call costs more than the faster product saves


class Product:
    """One product for layers that get the same tensor one after the other; most often for a single layer.

    The first layer that is called multiplies for all, the others return their parts. A part is returned once, so no
    call gets an earlier one's product. Between these calls the tensor must not be changed in place.

    Args:
        layers: plain linear layers of one width of input, all with a bias or none. Their weights become views of one.
        packed: True: in oneDNN's layout; False: in torch's.
    """

    def __init__(self, layers: Sequence[nn.Linear], packed: bool) -> None:
        self.widths = [layer.out_features for layer in layers]
        self.weight: torch.Tensor = layers[0].weight.detach()  # (sum of widths, in)
        self.bias: torch.Tensor | None = layers[0].bias
        if len(layers) > 1:
            self.weight = torch.cat([layer.weight.detach() for layer in layers])
            for layer, part in zip(layers, torch.split(self.weight, self.widths), strict=True):
                layer.weight.data = part  # the parameter stays the one that its owner's optimizer knows
            if self.bias is not None:
                self.bias = torch.cat([layer.bias.detach() for layer in layers])
        rows = 32  # oneDNN chooses the layout for so many; it serves one row and a hundred alike
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows) if packed else None
        self._held: tuple[torch.Tensor, list[torch.Tensor | None]] | None = None  # an input, its parts not yet returned

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None: copies and pickles of a layer multiply by their own weight."""
        return type(None), ()

    def output(self, part: int, input: torch.Tensor) -> torch.Tensor:
        """Return the part (..., out) of layer number `part`, for an input (..., in)."""
        if len(self.widths) == 1:
            return self.multiply(input)
        held = self._held  # read once: another thread may replace it meanwhile
        if held is None or held[0] is not input or held[1][part] is None:
            held = self._held = (input, list(torch.split(self.multiply(input), self.widths, dim=-1)))
        product, held[1][part] = held[1][part], None
        assert product is not None
        if part == len(self.widths) - 1:
            self._held = None  # all parts were returned
        return product

    def multiply(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply all parts at once: (..., in) -> (..., sum of widths)."""
        stock = self.packed is None or torch.compiler.is_compiling()
        if stock or input.numel() * self.weight.shape[0] < SMALL_PRODUCT:
            return nn.functional.linear(input, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            input, self.packed, self.bias, "none", [], ""
        )
        return product


class PackedLinear(nn.Linear):
    """A linear layer whose product is a `Product`'s, or a part of one.

    Gradients and autocast use its own weight, and so do calls after the weight was trained, loaded anew, cast, moved or
    copied. Writes through `weight.data` are not noticed.
    """

    product: Product | None  # None of a copy
    part: int
    packed_from: tuple[int, int]  # what `identity` of the weight was

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            return super().forward(input)
        if input.dtype is not weight.dtype or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        product = self.product
        if product is None or not (torch.compiler.is_compiling() or identity(self.weight) == self.packed_from):
            return super().forward(input)
        return product.output(self.part, input)


def identity(weight: torch.Tensor) -> tuple[int, int]:
    """Return a weight's address and how often it was written (0 where torch does not count)."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def packable(device: torch.device, dtype: torch.dtype) -> bool:
    """True if weights can be packed: float32 and, if oneDNN supports it, bfloat16 on an x86 processor."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fastest_linear(device: torch.device, dtype: torch.dtype) -> str:
    """Return the fastest `linear` of `Target` for a model on one device, if memory does not matter."""
    return "onednn" if packable(device, dtype) else "fused" if device.type == "cuda" else "torch"


def linear_bytes(module: nn.Module) -> int:
    """Return the bytes that packing adds: the weights of all plain linear layers."""
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in _plain(module))


def pack_linears(module: nn.Module, forward: Callable[[], object] | None = None, *, packed: bool = True) -> None:
    """Pack every plain linear layer of a module, in place.

    The weights stay too: small products, gradients and compiled code use them. Layers whose weights changed since are
    packed anew.

    Args:
        forward: runs the module once, to find layers that get the same tensor. Default: no layers share a product.
        packed: False: layers that get the same tensor share a product, by torch; the others stay.
    """
    unpack_linears(module, changed=True)
    layers = _plain(module)
    together = _sharing_input(layers, forward) if forward is not None else []
    shared = {layer for group in together for layer in group}
    alone = [[layer] for layer in layers if layer not in shared] if packed else []
    for group in [*together, *alone]:
        product = Product(group, packed)
        for part, layer in enumerate(group):
            layer.__class__ = PackedLinear
            vars(layer).update(product=product, part=part, packed_from=identity(layer.weight))


def unpack_linears(module: nn.Module, *, changed: bool = False) -> None:
    """Undo `pack_linears`: the layers are torch's again, each with its own weight.

    Args:
        changed: only layers whose weights have changed.
    """
    for layer in module.modules():
        if isinstance(layer, PackedLinear) and not (changed and identity(layer.weight) == layer.packed_from):
            if layer.product is not None and len(layer.product.widths) > 1:  # a part of one, which no file could take
                layer.weight.data = layer.weight.detach().clone()
            layer.__class__ = nn.Linear  # type: ignore[assignment]
            del vars(layer)["product"], vars(layer)["part"], vars(layer)["packed_from"]


def linear_of(module: nn.Module) -> str:
    """Return how a module's linear layers multiply now: onednn, fused or torch."""
    products = {layer.product for layer in module.modules() if isinstance(layer, PackedLinear)} - {None}
    packed = any(product is not None and product.packed is not None for product in products)
    return "onednn" if packed else "fused" if products else "torch"


@contextmanager
def stock_linears(module: nn.Module) -> Iterator[None]:
    """Within this block packed and fused layers multiply as torch's own, one by one; nothing is freed."""
    layers = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    for layer in layers:
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = PackedLinear


def _sharing_input(layers: Sequence[nn.Linear], forward: Callable[[], object]) -> list[list[nn.Linear]]:
    """List groups of layers that one forward calls in succession with the same tensor, each once."""
    calls: list[tuple[nn.Linear, object]] = []  # holds the tensors, so that `is` is valid

    def note(layer: nn.Module, args: tuple[object, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append((layer, args[0] if args else object()))

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    runs: list[list[nn.Linear]] = []
    for i, (layer, tensor) in enumerate(calls):
        if i and tensor is calls[i - 1][1]:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    times = Counter(layer for layer, _ in calls)
    return [
        run
        for run in runs
        if len(run) > 1
        and all(times[layer] == 1 for layer in run)
        and len({(layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in run}) == 1
    ]


def _plain(module: nn.Module) -> list[nn.Linear]:
    """List plain linear layers: no subclass, no parametrisation, no replaced forward."""
    return [
        layer
        for layer in module.modules()
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and "forward" not in vars(layer)
    ]
