"""Products of a few rows on a CPU: weights packed once in oneDNN's own layout.

A draft tree adds rows to each product with a weight, and drafting pays as far as these rows are cheap. In float32 torch
multiplies by MKL, whose small products are slow on a processor that is not Intel's. On an AMD EPYC (two threads),
microseconds for 1, 9 and 81 rows: 192 x 2048 25, 101, 377 by MKL and 21, 32, 151 packed; 4096 x 4096 2771, 7301 and
1281, 1570 (1 and 9 rows). Other types, other devices and other architectures keep torch's own products.
"""

from __future__ import annotations

import torch
from torch import nn

SMALL = 1 << 19  # multiplications below which the dearer call outweighs the faster product


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by `packed` where the product is large enough, by `weight` elsewhere."""

    packed: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        small = input.numel() * self.out_features < SMALL
        if small or torch.compiler.is_compiling() or (torch.is_grad_enabled() and input.requires_grad):
            return super().forward(input)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            input, self.packed, self.bias, "none", [], ""
        )
        return product


def packable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing is for this device and type: float32 on an x86 processor."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    )


def linear_bytes(module: nn.Module) -> int:
    """Bytes that packing adds: the weights of all plain linear layers."""
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in _plain(module))


def pack_linears(module: nn.Module) -> None:
    """Make every plain linear layer inside a packed one, in place.

    The weight stays too: small products, gradients and compiled code use it. It must not change any more.
    """
    for layer in _plain(module):
        layer.__class__ = PackedLinear
        rows = 32  # oneDNN chooses the layout for so many; it serves one row and a hundred alike
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)


def _plain(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter]
