"""What the engine can drive: everything else is refused by name, before a prompt is decoded."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import UserError
from .cache import LayerShape
from .grouped_attention import NAME


def unwrapped(model: Any) -> Any:
    """The transformers model inside what torch.compile or peft put around it. Adapters inside its layers stay active.

    Raises:
        UserError: an adapter that changes the inputs (prompt and prefix tuning), which a draft tree goes past.
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            check_inputs(model)
            model = model.get_base_model()
        else:
            return model


def check_inputs(model: Any) -> None:
    """Refuse a peft model whose adapter changes the inputs."""
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        kind = getattr(model.active_peft_config.peft_type, "value", model.active_peft_config.peft_type)
        raise UserError(f"{type(model).__name__}: {kind} puts tokens of its own before a text; this decoding has none")


def check_hooks(model: Any, name: str) -> None:
    """Refuse a model whose forward its owner had compiled, where a method needs a hook inside it."""
    for module in (model, model.get_decoder()):
        own = vars(module).get("forward")
        if module._compiled_call_impl is not None or hasattr(own, "_torchdynamo_orig_callable"):
            raise UserError(
                f"{name}: its forward is compiled, and this method reads hidden states inside it; give it uncompiled"
            )


def form_of(model: Any) -> tuple[Any, ...]:
    """What is known of a model for good: its attention, and each weight's shape, type and device."""
    attention = model.config.get_text_config()._attn_implementation
    attention = "sdpa" if attention == NAME else attention  # for a moment, by another model of the same config
    return (attention, *((weight.shape, weight.dtype, weight.device) for weight in model.parameters()))


def check_forward(model: Any, name: str) -> bool:
    """Refuse what the engine cannot drive; say whether `forward` takes `logits_to_keep`."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name}: an encoder-decoder model; the engine decodes causal language models only")
    if getattr(model, "_is_stateful", False):
        raise UserError(f"{name}: keeps a recurrent state, which cannot take back rejected tokens")
    kernel = getattr(model.config, "_attn_implementation", "sdpa")
    if kernel not in ("sdpa", "eager", NAME):
        raise UserError(f"{name}: attention {kernel!r} takes no tree mask; load with attn_implementation='sdpa'")
    takes = inspect.signature(model.forward).parameters
    for needed in ("position_ids", "past_key_values"):
        if needed not in takes:
            raise UserError(f"{name}: {type(model).__name__}.forward takes no {needed}, which a draft tree needs")
    return "logits_to_keep" in takes


def check_positions(config: Any, name: str, context: int) -> None:
    """Refuse positions that depend on the longest one in a forward: a draft beyond the threshold would change the root.

    transformers' RoPE of type `longrope` takes other frequencies for the whole forward as soon as one position is
    beyond the length it was first trained with (modeling_rope_utils, longrope_frequency_update). `dynamic` does so
    beyond max_position_embeddings, where no context goes.
    """
    given = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for parameters in (given, *(value for value in given.values() if isinstance(value, dict))):
        limit = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "longrope" and limit is not None and context > limit:
            raise UserError(
                f"{name}: its positions (longrope) are others once a text passes {limit} tokens, so that drafts would "
                f"change what the model says; set the context to {limit} or less"
            )


@torch.inference_mode()
def probe_layers(model: Any, name: str, context: int, device: torch.device) -> list[LayerShape]:
    """Forward one token through transformers' own cache and read what each layer stores: right for any model."""
    probe = DynamicCache(config=model.config)
    for i, layer in enumerate(probe.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            if layer.sliding_window < context:
                raise UserError(
                    f"{name}: layer {i} attends over a sliding window of {layer.sliding_window} tokens, less than "
                    f"the context of {context}; set the context to {layer.sliding_window} or less"
                )
        elif type(layer) is not DynamicLayer:
            raise UserError(f"{name}: layer {i} is a {type(layer).__name__}, whose state cannot take back tokens")
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), past_key_values=probe, use_cache=True)
    shapes = []
    for layer in probe.layers:
        keys, values = layer.keys, layer.values
        assert keys is not None and values is not None
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device))
    return shapes
