"""Models of a known shape with random weights, for step times. Needs only torch and transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from model.errors import UserError

SHAPES: dict[str, dict[str, int]] = {  # LLaMA shapes
    "vicuna-7b": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008),
    "vicuna-13b": dict(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=13824),
    "vicuna-33b": dict(hidden_size=6656, num_hidden_layers=60, num_attention_heads=52, intermediate_size=17920),
    "llama-3-8b": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14336)
    | dict(num_key_value_heads=8, vocab_size=128256),
    "small": dict(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1376, vocab_size=8192),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=256),
}


def check_shape(shape: str, flag: str, *also: str) -> None:
    """Raise UserError unless it is one of SHAPES or of `also`; `flag` names the option for the message."""
    if shape not in (*also, *SHAPES):
        raise UserError(f"{flag} {shape}: unknown; use {', '.join((*also, *SHAPES))}")


def random_weights(shape: str, device: torch.device, dtype: torch.dtype, kernel: str | None = None) -> Any:
    """Build a transformers model of one of SHAPES with weights from seed 0, without gradients."""
    torch.manual_seed(0)
    config = LlamaConfig(**{"vocab_size": 32000, "max_position_embeddings": 4096} | SHAPES[shape])
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel).eval()


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float16 on an accelerator, as in the paper, and float32 on the CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    dtype: torch.dtype = getattr(torch, name)
    return dtype
