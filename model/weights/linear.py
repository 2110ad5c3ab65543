"""Products with a model's weights that are faster than torch's own for the few rows of a draft.

On a CPU torch multiplies float32 by MKL, slowly on an AMD EPYC: 7301 us for 9 rows and 4096 x 4096,
and 1570 us in oneDNN's layout. FBGEMM widens 16-bit weights in registers; sums are taken in another
order. On a GPU layers that get the same tensor are one product.

All other callers of the model, gradients, autocast and compiled code multiply by the layer's own
weight. What the owner writes to it is noticed at the start of the next answer (`digest_of`).
"""

from __future__ import annotations

import hashlib
import math
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

LAYOUTS = {  # how linear layers may multiply, in words
    "half": "float32 from weights of 16 bits",
    "onednn": "weights packed in oneDNN's layout, a second copy of them",
    "fused": "layers of one input in one product",
    "torch": "its own products",
}
PACKED = ("half", "onednn")  # layouts that are copies of the weights
ROWS = 1, 9, 80, 400  # for which layouts are timed (`linear_choice`)
LIMITS = 2, 26, 178  # rows up to which the first, second and third of ROWS are the nearest by ratio
NARROW = (torch.float16, torch.bfloat16)
# multiplications below which a call, some 16 us, costs more than its product saves
SMALL_PRODUCT = 1 << 18
PACKING_ROWS = 32  # for which oneDNN chooses its layout, which serves one row and a hundred alike
CHUNK = 1 << 22  # elements of a weight that are checked at a time
SAMPLE = 1 << 12  # elements that mostly suffice to see that a weight has more than 16 bits
TOP = 15  # exponent to which a weight's greatest value is scaled
TINY = 2.0**-36  # tolerated error, relative to a row's greatest value
OWN_HOOKS: set[Any] = set()  # that act on linear layers alone; see `narrow_weights`
SAMPLED = 48  # values of a parameter, about, that are compared to notice a change


@dataclass(frozen=True)
class Layouts:
    """How linear layers multiply: half, onednn, fused or torch, by number of rows.

    Args:
        names: for each number of ROWS, or one for all. At most one is not torch.
        measured: one line on what was measured.
        auto: nobody asked for these layouts, so that a forward may do without (`lean_forward`).
    """

    names: tuple[str, ...]
    measured: str = field(default="", compare=False)
    auto: bool = field(default=False, compare=False)

    def of(self, rows: int) -> str:
        return self.names[min(bisect_left(LIMITS, rows), len(self.names) - 1)]

    @property
    def copy(self) -> str:
        """The layout that is not torch's own, if there is one."""
        return min(self.names, key="torch".__eq__)

    def __str__(self) -> str:
        rows = [rows for rows in ROWS if self.of(rows) == self.copy]
        return (
            self.copy
            if len(rows) == len(ROWS)
            else f"{self.copy} for about {rows} rows, torch for others"
        )


class Packed:
    """A copy of a weight for fast products: of 16 bits where its values fit, else oneDNN's.

    Args:
        weight: of a linear layer, (out, in).
        half: try 16 bits.
        wide: the layer computes in float32 whatever the weight's type is (`narrow_weights`).

    Attributes:
        packed: None if neither layout is possible.
        exponent: 16-bit values are the weight's times 2 ** exponent; None in oneDNN's layout.
    """

    def __init__(self, weight: Tensor, *, half: bool, wide: bool = False) -> None:
        source = weight.detach()
        self._wide = wide
        self._takes = torch.float32 if wide else weight.dtype
        self.exponent = _exponent(weight) if half else None
        self.packed = None
        self.kind = "onednn" if self.exponent is None else "half"
        if self.exponent is not None:
            scaled = source.float() * 2.0**self.exponent
            self.packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        elif packable(weight.device, self._takes):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(
                source.to(self._takes), PACKING_ROWS
            )

    def serves(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """True if a call is worth it for this input (..., in)."""
        large = self._wide or input.numel() * len(weight) >= SMALL_PRODUCT
        return large and input.dtype is self._takes

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor
        if self._wide:
            bias = _widened(bias, input)
        if self.exponent is None:
            product = torch.ops.mkldnn._linear_pointwise.default(
                input, self.packed, bias, "none", [], ""
            )
            return product
        product = torch.ops.quantized.linear_dynamic_fp16(input.float(), self.packed)
        if self.exponent:
            product.mul_(2.0**-self.exponent)
        product = product if bias is None else product.add_(bias)
        return product.to(input.dtype)


class Fused:
    """One product for layers that get the same tensor one after the other.

    The first layer that is called multiplies for all, and the last one frees the product.

    Args:
        layers: of one width of input, all with a bias or none. Their parameters become views of one
            tensor.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.widths = [layer.out_features for layer in layers]
        self.weight = _joined([layer.weight for layer in layers])  # (sum of widths, in)
        # (sum of widths,)
        self.bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] | None = None  # of the product with this input

    def multiply(self, input: Tensor) -> None:
        self.input = input
        self.parts = torch.split(own_product(input, self.weight, self.bias), self.widths, dim=-1)

    def take(self, number: int) -> Tensor:
        assert self.parts is not None
        part = self.parts[number]
        if number == len(self.widths) - 1:
            self.input = None
            self.parts = None
        return part


@dataclass
class Part:
    fused: Fused
    number: int  # in the order of the layers' calls
    addresses: list[int]  # of its parameters at the time of fusing
    kind = "fused"

    def serves(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """True if the layer's parameters are still views of the product's."""
        return self.addresses == _addresses(weight, bias)

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        if self.number == 0 or self.fused.input is not input:
            self.fused.multiply(input)
        return self.fused.take(self.number)

    def compiled_product(self, input: Tensor) -> Tensor:
        """Return the product inside compiled code, which calls all layers in order."""
        if self.number == 0:
            self.fused.multiply(input)
        return self.fused.take(self.number)


class _Ours(threading.local):
    """The copies that this thread's linear layers multiply by in the engine's forwards."""

    copies: Mapping[nn.Module, Packed | Part] = {}


OURS = _Ours()


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a copy of its weight, in the engine's forwards alone."""

    joined: Part | None = None  # in compiled layers of a captured step

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight  # read once: a parametrization computes it
        bias = self.bias
        if torch.compiler.is_compiling():
            if self.joined is not None:
                return self.joined.compiled_product(input)
            return own_product(input, weight, bias)
        copy = OURS.copies.get(self) if OURS.copies else None
        # pruning and parametrizations compute it; a subclass may multiply otherwise
        if copy is None or type(weight) is not nn.Parameter:
            return own_product(input, weight, bias)
        other = torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type)
        if other or not copy.serves(input, weight, bias):
            return own_product(input, weight, bias)
        return copy.product(input, bias)


class WideEmbedding(nn.Embedding):
    """An embedding of 16 bits whose rows are widened to the type of the buffer `wide`."""

    wide: Tensor  # a scalar

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.wide.dtype)


class Copies:
    """Copies of the weights of a model and of drafters' networks, in one layout.

    The targets of one model and layout share them (`copies_of`).
    """

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.by_layer: WeakKeyDictionary[nn.Module, Packed | Part] = WeakKeyDictionary()
        # digests of what is packed
        self._values: WeakKeyDictionary[nn.Module, bytes] = WeakKeyDictionary()

    @contextmanager
    def used(self) -> Iterator[None]:
        outside = OURS.copies
        OURS.copies = self.by_layer
        try:
            yield
        finally:
            OURS.copies = outside

    @property
    def kind(self) -> str:
        kinds = [
            copy.kind
            for layer, copy in self.by_layer.items()
            if copy.kind != "fused" or self.is_fused(layer)
        ]
        # half before onednn, which is for weights that do not fit
        return min(kinds, default="torch")

    def refresh(self, module: nn.Module) -> bytes:
        """Pack a module's layers, and all others that changed since; return the module's digest."""
        self._values.setdefault(module, b"")
        for each in list(self._values):
            values = digest_of(each)
            if self._values[each] != values and self.layout in PACKED:
                self._pack(each)
            self._values[each] = values
        return self._values[module]

    def _pack(self, module: nn.Module) -> None:
        for layer in module.modules():  # also of layers that are plain no longer
            self.by_layer.pop(layer, None)
        narrow = is_narrow(module)

        def packed(layer: nn.Linear) -> Packed:
            weight = layer.weight
            wide = narrow and weight.dtype in NARROW
            half = self.layout == "half" and (wide or weight.dtype is not torch.bfloat16)
            return Packed(weight, half=half, wide=wide)

        layers = plain_linears(module)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # torch packs in one thread
            for layer, copy in zip(layers, pool.map(packed, layers), strict=True):
                if copy.packed is not None:
                    self.by_layer[layer] = copy
                    layer.__class__ = PackedLinear

    def fuse(self, module: nn.Module, forward: Callable[[], object]) -> None:
        """Fuse a module's layers that get the same tensor.

        Args:
            forward: runs the module once, to find them.
        """
        layers = [layer for layer in plain_linears(module) if not self.is_fused(layer)]
        for group in _sharing_input(layers, forward):
            fused = Fused(group)
            for number, layer in enumerate(group):
                self.by_layer[layer] = Part(fused, number, _addresses(layer.weight, layer.bias))
                layer.__class__ = PackedLinear

    def is_fused(self, layer: Any) -> bool:
        part = self.by_layer.get(layer)
        return isinstance(part, Part) and part.serves(layer.weight, layer.weight, layer.bias)

    def clear(self) -> None:
        for layer, copy in self.by_layer.items():
            for parameter in layer.parameters() if isinstance(copy, Part) else ():
                with torch.inference_mode(parameter.is_inference()):
                    parameter.data = parameter.detach().clone()
        self.by_layer.clear()
        self._values.update(dict.fromkeys(self._values, b""))


_copies: WeakKeyDictionary[nn.Module, WeakValueDictionary[str, Copies]] = WeakKeyDictionary()


def copies_of(model: nn.Module, layout: str) -> Copies:
    """Return a model's copies in this layout; they live as long as a target uses them."""
    return _copies.setdefault(model, WeakValueDictionary()).setdefault(layout, Copies(layout))


def version(weight: Tensor) -> int:
    """Return how often a weight was written; 0 where torch does not count."""
    return 0 if weight.is_inference() else weight._version


def digest_of(module: nn.Module) -> bytes:
    """Return a digest of all parameters and buffers: addresses, counted writes, some values."""
    stamps = list[tuple[int, int]]()
    samples = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for tensor in (*module.parameters(), *module.buffers()):
        stamps.append((tensor.data_ptr(), version(tensor)))
        if not (tensor.is_meta or hasattr(tensor, "__tensor_flatten__")):
            # fused optimizers, NumPy and `.data` write without being counted
            flat = tensor.detach().reshape(-1)
            samples[tensor.device, tensor.dtype].append(flat[:: flat.numel() // SAMPLED | 1])
    digest = hashlib.blake2b(repr(stamps).encode(), digest_size=16)
    for sample in samples.values():
        digest.update(torch.cat(sample).view(torch.uint8).cpu().numpy().data)
    return digest.digest()


def packable(device: torch.device, dtype: torch.dtype) -> bool:
    """True if weights can be packed: float32 and, where oneDNN supports it, bfloat16 on x86."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@cache
def halves() -> bool:
    """True if this torch and processor multiply float32 by 16-bit weights (FBGEMM's, on x86)."""
    try:
        one = torch.ops.quantized.linear_prepack_fp16(torch.ones(1, 1), None)
        return bool(torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 1), one) == 1)
    # torch has no such product, or another engine for it
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def half_bytes(model: nn.Module) -> int:
    narrow = is_narrow(model)
    return sum(
        2 * layer.weight.numel()
        for layer in plain_linears(model)
        if _fits_half(layer.weight, narrow)
    )


def linear_bytes(module: nn.Module) -> int:
    return sum(layer.weight.nbytes for layer in plain_linears(module))


def is_narrow(model: nn.Module) -> bool:
    """True if a model computes in float32 from weights of 16 bits (`narrow_weights`)."""
    wide = (each.wide.dtype for each in model.modules() if isinstance(each, WideEmbedding))
    return torch.float32 in wide and any(
        parameter.dtype in NARROW for parameter in model.parameters()
    )


def packed_linears(model: nn.Module) -> list[nn.Module]:
    """List the layers that a target has made `PackedLinear`; none of a narrow model."""
    layers = () if is_narrow(model) else model.modules()
    return [layer for layer in layers if type(layer) is PackedLinear]


def unpack_linears(model: nn.Module) -> None:
    """Free all copies of a model's weights; layers are torch's again, unless it is narrow."""
    for copies in _copies.get(model, {}).values():
        copies.clear()
    for layer in packed_linears(model):
        layer.__class__ = nn.Linear


@contextmanager
def stock_linears(model: nn.Module) -> Iterator[None]:
    layers = packed_linears(model)  # a narrow model's must widen: they stay
    for layer in layers:
        layer.__class__ = nn.Linear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = PackedLinear


def _widened(parameter: Any, input: Tensor) -> Any:
    """Return a weight or bias, in the input's type if only it has 16 bits."""
    if parameter is not None and parameter.dtype in NARROW and input.dtype not in NARROW:
        return parameter.to(input.dtype)
    return parameter


def own_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dtype is not input.dtype:
        weight = _widened(weight, input)
        bias = _widened(bias, input)
    return nn.functional.linear(input, weight, bias)


def _fits_half(weight: Tensor, narrow: bool) -> bool:
    """True if a sample of a weight fits; bfloat16 texts would change with any other product."""
    sample = weight[: SAMPLE // weight.shape[1] + 1]
    return (narrow or weight.dtype is not torch.bfloat16) and _exponent(sample) is not None


@torch.no_grad()
def _exponent(weight: Tensor) -> int | None:
    """Return the exponent of two that scales a weight's values to float16 numbers, if there is one.

    A value far below its row's greatest may lose bits: the loss is below TINY of the greatest,
    while a float32 sum that includes the greatest rounds at 2 ** -24.
    """
    if (
        not halves()
        or weight.device.type != "cpu"
        or not weight.is_floating_point()
        or weight.numel() == 0
    ):
        return None
    chunks = torch.split(weight.detach(), max(CHUNK // weight.shape[1], 1))
    top = max(chunk.abs().max().item() for chunk in chunks)
    if not math.isfinite(top):
        return None

    def fits(chunk: Tensor, scale: float) -> bool:
        scaled = chunk.float() * scale
        lost = (scaled.half().float() - scaled).abs()
        return bool((lost <= TINY * scaled.abs().amax(dim=1, keepdim=True)).all())

    for exponent in (0, TOP - math.frexp(top)[1]):
        if top * 2.0**exponent < 2.0**16 and all(fits(chunk, 2.0**exponent) for chunk in chunks):
            return exponent
    return None


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """Concatenate parameters (n_i, ...) to (sum of n_i, ...), of which they become views."""
    with torch.inference_mode(parameters[0].is_inference()):  # parameters stay what they are
        joined = torch.cat([parameter.detach() for parameter in parameters])
        views = torch.split(joined, [len(parameter) for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view  # the parameter stays the one that its owner's optimizer knows
    return joined


def _addresses(*parameters: Tensor | None) -> list[int]:
    return [parameter.data_ptr() for parameter in parameters if parameter is not None]


def _sharing_input(
    layers: Sequence[nn.Linear], forward: Callable[[], object]
) -> list[list[nn.Linear]]:
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
    runs = [[layer for layer, _ in run] for _, run in groupby(calls, lambda call: id(call[1]))]
    return [
        run
        for run in runs
        if len(run) > 1
        and len({(layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in run})
        == 1
    ]


def plain_linears(module: nn.Module) -> list[nn.Linear]:
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
        and type(layer) in (nn.Linear, PackedLinear)
        and type(layer.weight) is nn.Parameter
        and "forward" not in vars(layer)
    ]
