"""Quantise weights to 8 or 4 bits with torchao.

A memory-bound step reads a half or a quarter as much.

Every method then reproduces the quantised model's own decoding. Embeddings, and with int4 the head,
are not quantised.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import UserError, one_line

QUANTIZE = ("int8", "int4")
GROUP_SIZE = 64  # weights per scale with int4; divides the widths of all models in configs/model
# least quantised share of the weights, without embeddings and head; a router may stay as it is
LEAST_SHARE = 0.9


def quantize(model: Any, to: str, device: torch.device) -> None:
    """Quantise a model's linear layers in place, on the device, and move the model there.

    Args:
        to: int8: one scale per output; int4: one scale per 64 weights of an output, with torch's
            own CUDA kernel.

    Raises:
        UserError: torchao is missing, or supports nothing for this device and type.
    """
    if to not in QUANTIZE:
        raise UserError(f"quantize={to}: there is {', '.join(QUANTIZE)}")

    weight = model.get_input_embeddings().weight
    if to == "int4" and (device.type != "cuda" or weight.dtype != torch.bfloat16):
        raise UserError(
            f"quantize=int4: is for bfloat16 on a CUDA device, this is {weight.dtype} on {device};"
            " use int8"
        )

    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise UserError(f"quantize={to}: needs torchao; pip install torchao ({error})") from None

    if to == "int4":
        config = Int4WeightOnlyConfig(
            group_size=GROUP_SIZE,
            int4_packing_format="tile_packed_to_4d",
            set_inductor_config=False,
        )
        left_out = model.get_output_embeddings()
    else:
        config = Int8WeightOnlyConfig(set_inductor_config=False)
        left_out = None

    try:
        quantize_(
            model,
            config,
            lambda layer, _: type(layer) is torch.nn.Linear and layer is not left_out,
            device,
        )
    except (RuntimeError, ValueError, NotImplementedError, AssertionError, ImportError) as error:
        raise UserError(
            f"quantize={to}: torchao refuses this model ({one_line(error)[:300]})"
        ) from None

    _check_done(model, to)


def _check_done(model: Any, to: str) -> None:
    """Raise UserError if torchao left more than a tenth of the weights unquantised.

    Fused experts are an example.
    """
    vocabulary = {
        id(module.weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    matrices = [p for p in model.parameters() if p.dim() > 1 and id(p) not in vocabulary]
    quantised = sum(p.numel() for p in matrices if hasattr(p, "__tensor_flatten__"))
    share = quantised / max(sum(p.numel() for p in matrices), 1)
    if share < LEAST_SHARE:
        raise UserError(
            f"quantize={to}: torchao quantises {share:.0%} of this model's weights, as the others"
            " are no plain linear"
            f" layers{f' or of a width that {GROUP_SIZE} does not divide' if to == 'int4' else ''}"
        )
