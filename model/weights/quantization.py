"""Quantise weights by torchao while transformers loads them.

Embeddings are not quantised, nor a head tied to them, nor any head with int4.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UserError

QUANTIZE = ("int8", "int4")
GROUP_SIZE = 64  # weights per scale with int4; divides the widths of all models in configs/model


def torchao_config(to: str, device: torch.device) -> Any:
    if to not in QUANTIZE:
        raise UserError(f"quantize={to}: there is {', '.join(QUANTIZE)}")
    if to == "int4" and device.type != "cuda":
        raise UserError(
            f"quantize=int4: is for bfloat16 on a CUDA device, this is {device}; use int8"
        )

    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
        from transformers import TorchAoConfig
    except ImportError as error:
        raise UserError(f"quantize={to}: needs torchao; pip install torchao ({error})") from None

    if to == "int8":
        weights = Int8WeightOnlyConfig(set_inductor_config=False)
        return TorchAoConfig(weights, modules_to_not_convert=[])  # the head, too
    weights = Int4WeightOnlyConfig(
        group_size=GROUP_SIZE, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )
    return TorchAoConfig(weights)
