"""Weights of 8 or 4 bits, by torchao: a step that waits for the memory reads a half or a quarter as much.

What a model says with such weights is not what it says with its own; every method reproduces the quantised model's
own decoding, plain decoding and `generate` among them. The table of embeddings stays as it is, and with int4 the head.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import UserError

QUANTIZE = ("int8", "int4")
GROUP = 64  # weights of one scale with int4; divides the widths of all models in configs/model


def quantize(model: Any, to: str, device: torch.device) -> None:
    """Quantise a model's linear layers in place, one after the other on the device, where the model is afterwards.

    Args:
        to: int8: a scale for each output; int4: a scale for each 64 weights of it, torch's own kernel for CUDA.

    Raises:
        UserError: no torchao, or one that has nothing for this device and type; says which.
    """
    if to not in QUANTIZE:
        raise UserError(f"quantize={to}: there is {', '.join(QUANTIZE)}")
    weight = model.get_input_embeddings().weight
    if to == "int4" and (device.type != "cuda" or weight.dtype != torch.bfloat16):
        raise UserError(
            f"quantize=int4: is for bfloat16 on a CUDA device, this is {weight.dtype} on {device}; use int8"
        )
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise UserError(f"quantize={to}: needs torchao; pip install torchao ({error})") from None
    head = model.get_output_embeddings()
    if to == "int8":
        how, chosen = Int8WeightOnlyConfig(), _linear
    else:
        how = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
        chosen = lambda layer, name: _linear(layer, name) and layer is not head  # noqa: E731
    try:
        quantize_(model, how, chosen, device)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError, ImportError) as error:
        raise UserError(f"quantize={to}: torchao refuses this model ({' '.join(str(error).split())[:300]})") from None


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes in memory; of a quantised tensor those of its parts."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def _linear(layer: Any, name: str) -> bool:
    return type(layer) is torch.nn.Linear
