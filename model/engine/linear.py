"""Products with a model's weights that are faster than torch's own for the few rows of a draft.

On a CPU torch multiplies float32 by MKL, whose small products are slow on a processor that is not Intel's. On an AMD
EPYC (two threads), microseconds for 1, 9 and 81 rows: 192 x 2048 25, 101, 377 by MKL and 21, 32, 151 in oneDNN's
layout; 4096 x 4096 2771, 7301 and 1281, 1570 (1 and 9 rows). bfloat16 gains, too: on an Intel Xeon that emulates it,
4096 x 4096 takes 1702 and 8733 instead of 2758 and 10776 (1 and 9 rows); in float32 it takes 4679 and 4366.

Most checkpoints have 16-bit weights. FBGEMM keeps these in 16 bits and widens them in registers: products and sums are
of float32, and one row reads half the bytes. If a weight's values are float16 numbers times a power of two, the result
is the float32 product. Its sums are rounded as in float32, but taken in another order.

On a GPU layers that get the same tensor (queries, keys and values; gate and up) are one product: fewer launches.

Gradients, autocast, compiled code and all other callers of the model use the layer's own weight. What the owner writes
to it is noticed at the start of our next answer (`fingerprint`).
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

PACKED = ("half", "onednn")  # layouts that are copies of the weights
HELD = "_weights_held"  # attribute of a model, see `holding`
SMALL_PRODUCT = 1 << 19  # multiplications below which oneDNN's call, some 16 us, costs more than its product saves
ROWS = 32  # rows for which oneDNN chooses its layout; the layout serves one row and a hundred alike
CHUNK = 1 << 22  # elements of a weight that are checked at a time
SAMPLE = 1 << 12  # elements that mostly suffice to see that a weight has more than 16 bits
TOP, TINY = 15, 2.0**-36  # exponent to which a weight's greatest value is scaled; tolerated error over a row's greatest
SAMPLED = 48  # values of a parameter, about, that are compared to notice a change


class _Ours(threading.local):
    """True while this thread is in one of the engine's forwards."""

    forward = False


OURS = _Ours()


class _Uncopied:
    """What a layer keeps next to its parameters; copies and pickles of the layer have None in its place."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Packed(_Uncopied):
    """A copy of a weight in a layout for fast products: of 16 bits where its values fit, else oneDNN's.

    Args:
        values: the model's `fingerprint` at this time.
        everywhere: for all callers of the layer; False: in the engine's own forwards only.
        half: try 16 bits.

    Attributes:
        weight: None if neither layout is possible, as after a cast.
        exponent: the 16-bit values are the weight's times 2 ** exponent; None in oneDNN's layout.
    """

    def __init__(
        self, source: torch.Tensor, values: bytes = b"", *, everywhere: bool = True, half: bool = False
    ) -> None:
        self.source, self.identity = source, identity(source)  # kept, so that its address is not reused
        self.values, self.everywhere = values, everywhere
        self.weight, self.exponent = None, _exponent(source) if half else None
        if self.exponent is not None:
            wide = source.detach().float()
            wide = wide * 2.0**self.exponent if self.exponent else wide
            self.weight = torch.ops.quantized.linear_prepack_fp16(wide, None)
        elif packable(source.device, source.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(source.detach(), ROWS)

    def is_of(self, weight: torch.Tensor) -> bool:
        """True if this weight is the one that was packed, and torch counted no write since."""
        return self.source is weight and self.identity == identity(weight)

    def product(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the product (..., out) with an input (..., in), plus the bias."""
        product: torch.Tensor
        if self.exponent is None:
            product = torch.ops.mkldnn._linear_pointwise.default(input, self.weight, bias, "none", [], "")
            return product
        product = torch.ops.quantized.linear_dynamic_fp16(input.float(), self.weight)
        if self.exponent:
            product.mul_(2.0**-self.exponent)
        product = product if bias is None else product.add_(bias)
        return product.to(input.dtype)


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a packed copy of its weight, until the weight is written or replaced.

    If the weight has 16 bits and the input is float32 (`holding`), the weight is widened where no copy can be used.
    """

    packed: Packed | None  # None in a copy of the layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        packed: Packed | None = vars(self).get("packed")  # read once: another thread may replace or remove it meanwhile
        if (
            packed is not None
            and packed.weight is not None
            and (OURS.forward or packed.everywhere)
            and _replaceable(self, input)
            and (self.weight.dtype is not input.dtype or input.numel() * self.out_features >= SMALL_PRODUCT)
            and packed.is_of(self.weight)
        ):
            return packed.product(input, self.bias)
        weight = self.weight if self.weight.dtype is input.dtype else self.weight.to(input.dtype)
        return nn.functional.linear(input, weight, self.bias)


class Fused:
    """One product for layers that get the same tensor one after the other.

    The first layer that is called multiplies for all, the others return their parts. A part is returned once, so no
    call gets an earlier one's product. Between these calls the tensor must not be changed in place.

    Args:
        layers: plain linear layers of one width of input, all with a bias or none. Their parameters stay the same
            objects; weights become views of one tensor, and biases too.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.widths = [layer.out_features for layer in layers]
        self.weight = _joined([layer.weight for layer in layers])  # (sum of widths, in)
        self.bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])  # (sum of widths,)
        # An input, and the parts not yet returned
        self._unread: tuple[torch.Tensor, list[torch.Tensor | None]] | None = None

    def output(self, number: int, input: torch.Tensor) -> torch.Tensor:
        """Return the part (..., out) of a layer by its number, for an input (..., in)."""
        unread = self._unread  # read once: another thread may replace it meanwhile
        if unread is None or unread[0] is not input or unread[1][number] is None:
            products = nn.functional.linear(input, self.weight, self.bias)  # (..., sum of widths)
            unread = self._unread = (input, list(torch.split(products, self.widths, dim=-1)))
        product, unread[1][number] = unread[1][number], None
        assert product is not None
        if number == len(self.widths) - 1:
            self._unread = None  # all parts were returned
        return product


class Part(_Uncopied):
    """A layer's part of a `Fused` product, and the addresses of its parameters at the time of fusing."""

    def __init__(self, fused: Fused, number: int, layer: nn.Linear) -> None:
        self.fused, self.number, self._addresses = fused, number, _addresses(layer)

    def is_of(self, layer: nn.Linear) -> bool:
        """True if the layer's parameters are still views of the product's."""
        return self._addresses == _addresses(layer)


class FusedLinear(nn.Linear):
    """A linear layer whose product is a part of a `Fused` one, until its parameters are replaced, cast or moved."""

    part: Part | None  # None in a copy of the layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        part = vars(self).get("part")  # another thread may remove it meanwhile
        if part is None or not _replaceable(self, input) or not part.is_of(self):
            return nn.functional.linear(input, self.weight, self.bias)
        product: torch.Tensor = part.fused.output(part.number, input)
        return product


def identity(weight: torch.Tensor) -> tuple[int, int]:
    """Return a weight's address and how often it was written (0 where torch does not count)."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def fingerprint(module: nn.Module) -> bytes:
    """Return a digest of all parameters and buffers: addresses, counted writes, and some values of each.

    Fused optimizers, NumPy and `.data` write without being counted, and an address may be used again.
    """
    stamps, samples = list[tuple[int, int]](), defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]](list)
    for tensor in (*module.parameters(), *module.buffers()):
        stamps.append(identity(tensor))
        if not (tensor.is_meta or hasattr(tensor, "__tensor_flatten__")):
            flat = tensor.detach().reshape(-1)
            samples[tensor.device, tensor.dtype].append(flat[:: flat.numel() // SAMPLED | 1])
    digest = hashlib.blake2b(repr(stamps).encode(), digest_size=16)
    for sample in samples.values():
        digest.update(torch.cat(sample).view(torch.uint8).cpu().numpy().data)
    return digest.digest()


def packable(device: torch.device, dtype: torch.dtype) -> bool:
    """True if weights can be packed: float32 and, if oneDNN supports it, bfloat16 on an x86 processor."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def halves() -> bool:
    """True if this torch and processor multiply float32 by 16-bit weights (FBGEMM's, on x86)."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    try:
        one = torch.ops.quantized.linear_prepack_fp16(torch.ones(1, 1), None)
        return bool(torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 1), one) == 1)
    except (AttributeError, RuntimeError, NotImplementedError):  # torch has no such product, or another engine for it
        return False


def has_half(module: nn.Module) -> bool:
    """True if weights of plain linear layers can be kept in 16 bits, as far as samples tell."""
    return any(_fits_half(layer.weight) for layer in plain_linears(module))


def linear_bytes(module: nn.Module, *, half: bool = False) -> int:
    """Return the bytes that packing adds for the weights of all plain linear layers.

    Args:
        half: weights whose values fit are kept in 16 bits.
    """
    weights = [layer.weight for layer in plain_linears(module)]
    return sum(w.numel() * (2 if half and _fits_half(w) else w.element_size()) for w in weights)


def pack_linears(module: nn.Module, values: bytes = b"", *, half: bool = False, everywhere: bool = True) -> None:
    """Keep a packed copy of the weight of every plain linear layer of a module; pack anew what has changed.

    Args:
        half: of 16 bits where the values fit.
        values, everywhere: as `Packed` takes them.
    """
    layers = [*plain_linears(module), *(layer for layer in module.modules() if isinstance(layer, PackedLinear))]
    for layer in layers:
        packed = vars(layer).get("packed")
        if packed is not None and not packed.values and packed.is_of(layer.weight):
            packed.values = values  # packed at loading
        if packed is None or packed.values != values or not packed.is_of(layer.weight):
            fits = half and (layer.weight.dtype is not torch.bfloat16 or is_held(module))
            vars(layer)["packed"] = Packed(layer.weight, values, everywhere=everywhere, half=fits)
            layer.__class__ = PackedLinear


def is_held(model: nn.Module) -> bool:
    """True if a model computes in float32 from weights of 16 bits (`holding`)."""
    return HELD in vars(model)


@torch.inference_mode(False)  # parameters must not become inference tensors
def fuse_linears(module: nn.Module, forward: Callable[[], object]) -> None:
    """Fuse plain linear layers of a module that get the same tensor. Layers that left their product are fused anew.

    Args:
        forward: runs the module once, to find them.
    """
    for layer in module.modules():
        if isinstance(layer, FusedLinear) and not (layer.part and layer.part.is_of(layer)):
            _restore(layer)
    for layers in _sharing_input(plain_linears(module), forward):
        fused = Fused(layers)
        for number, layer in enumerate(layers):
            vars(layer)["part"] = Part(fused, number, layer)
            layer.__class__ = FusedLinear


@torch.inference_mode(False)
def unpack_linears(module: nn.Module) -> None:
    """Undo the other functions: the layers are torch's again, each with its own weight and bias.

    A model whose weights are kept in 16 bits (`holding`) stays as it was loaded.
    """
    if is_held(module):
        return
    for layer in module.modules():
        if isinstance(layer, FusedLinear):
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.detach().clone()
        if isinstance(layer, PackedLinear | FusedLinear):
            _restore(layer)


def linear_of(module: nn.Module) -> str:
    """Return how a module's linear layers multiply now: half, onednn, fused or torch.

    Layers whose weights were replaced by others, as by `load_state_dict(assign=True)`, are fused no longer.
    """
    layers = list(module.modules())
    fused = any(isinstance(layer, FusedLinear) and layer.part and layer.part.is_of(layer) for layer in layers)
    packed = [layer.packed for layer in layers if isinstance(layer, PackedLinear)]
    half = any(copy is not None and copy.exponent is not None for copy in packed)
    return "half" if half else "onednn" if packed else "fused" if fused else "torch"


@contextmanager
def stock_linears(module: nn.Module) -> Iterator[None]:
    """Within this block packed and fused layers multiply as torch's own, one by one; nothing is freed.

    Layers whose weights are kept only in 16 bits (`holding`) have no product of torch's own, and stay packed.
    """
    replaced = () if is_held(module) else (PackedLinear, FusedLinear)
    kinds = [(layer, type(layer)) for layer in module.modules() if isinstance(layer, replaced)]
    for layer, _ in kinds:
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, kind in kinds:
            layer.__class__ = kind


def _restore(layer: nn.Linear) -> None:
    """Make a layer torch's own again; its parameters stay as they are."""
    layer.__class__ = nn.Linear
    vars(layer).pop("packed", None)
    vars(layer).pop("part", None)


def _replaceable(layer: nn.Linear, input: torch.Tensor) -> bool:
    """True if another product may take the place of torch's own: no gradients, no autocast, not being compiled."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    fits = input.dtype is layer.weight.dtype or (input.dtype is torch.float32 and isinstance(layer, PackedLinear))
    return fits and not torch.is_autocast_enabled(input.device.type)


def _fits_half(weight: torch.Tensor) -> bool:
    """True if a sample of a weight fits; bfloat16 is left to torch, as its text changes with any other product."""
    return weight.dtype is not torch.bfloat16 and _exponent(weight[: SAMPLE // weight.shape[1] + 1]) is not None


@torch.no_grad()
def _exponent(weight: torch.Tensor) -> int | None:
    """Return the exponent of a power of two that scales a weight's values to float16 numbers; None if there is none.

    A value far below its row's greatest may lose bits: the loss is below TINY of the greatest, while a float32 sum that
    includes the greatest rounds at 2 ** -24.

    Args:
        weight: (out, in).
    """
    if not halves() or weight.device.type != "cpu" or not weight.is_floating_point() or weight.numel() == 0:
        return None
    chunks = torch.split(weight.detach(), max(CHUNK // weight.shape[1], 1))
    if weight.dtype is torch.float16:
        return 0 if all(chunk.isfinite().all() for chunk in chunks) else None
    top = max(chunk.abs().max().item() for chunk in chunks)
    if not math.isfinite(top):
        return None

    def fits(chunk: torch.Tensor, scale: float) -> bool:
        scaled = chunk.float() * scale
        lost = (scaled.half().float() - scaled).abs()
        return bool((lost <= TINY * scaled.abs().amax(dim=1, keepdim=True)).all())

    for exponent in (0, TOP - math.frexp(top)[1]):
        if top * 2.0**exponent < 2.0**16 and all(fits(chunk, 2.0**exponent) for chunk in chunks):
            return exponent
    return None


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate parameters (n_i, ...) to (sum of n_i, ...), of which they become views."""
    joined = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, view in zip(parameters, torch.split(joined, [len(p) for p in parameters]), strict=True):
        parameter.data = view  # the parameter stays the one that its owner's optimizer knows
    return joined


def _addresses(layer: nn.Linear) -> tuple[int, int]:
    """Return where a layer's weight and bias are; 0 for no bias."""
    return layer.weight.data_ptr(), 0 if layer.bias is None else layer.bias.data_ptr()


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


def plain_linears(module: nn.Module) -> list[nn.Linear]:
    """List plain linear layers: no subclass, no parametrisation, no replaced forward."""
    return [
        layer
        for layer in module.modules()
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and "forward" not in vars(layer)
    ]
