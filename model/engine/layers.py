"""What the layers of a model store and see, and what of it the engine cannot drive."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import UserError, one_line
from .cache import LayerShape
from .grouped_attention import SDPA_GROUPED


@dataclass(frozen=True)
class Reach:
    """How far a layer of bounded attention sees.

    Attributes:
        positions: a window of so many positions, the own one included; or the size of the chunks.
        chunked: whether a text is cut into chunks, each of which sees itself alone.
    """

    positions: int
    chunked: bool

    def hides(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """bool (n, c): True where the token at position `rows` (n,) does not see the one at `columns` (c,)."""
        if self.chunked:
            return rows[:, None] // self.positions != columns // self.positions
        return rows[:, None] - columns >= self.positions


def check_training(model: Any, name: str) -> None:
    """Refuse a model that keeps no cache because it is being trained with gradient checkpointing."""
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise UserError(f"{name}: is in training mode with gradient checkpointing, which keeps no cache; call eval()")


def check_forward(model: Any, name: str) -> bool:
    """Refuse what the engine cannot drive; say whether `forward` takes `logits_to_keep`."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name}: an encoder-decoder model; the engine decodes causal language models only")
    if getattr(model, "_is_stateful", False):
        raise UserError(f"{name}: keeps a recurrent state, which cannot take back rejected tokens")
    check_training(model, name)
    kernel = getattr(model.config, "_attn_implementation", "sdpa")
    if kernel not in ("sdpa", "eager", SDPA_GROUPED):
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


def check_places(config: Any, name: str, context: int) -> None:
    """Refuse attention that counts places in the cache, where siblings of a tree follow one another, as positions.

    ALiBi does; windows of GPT-Neo's local layers and Doge's dynamic mask do once a text is longer.
    """
    if getattr(config, "alibi", False):
        raise UserError(f"{name}: ALiBi counts places in the cache, where a draft's siblings follow one another")
    local = getattr(config, "window_size", None) if "local" in getattr(config, "attention_layers", ()) else None
    for window in (local, getattr(config, "keep_window_size", None)):
        if window is not None and window < context:
            raise UserError(
                f"{name}: its attention counts places in the cache once a text is longer than {window} tokens; set the "
                f"context to {window} or less"
            )


@torch.inference_mode()
def probe_layers(model: Any, name: str, device: torch.device) -> tuple[list[LayerShape | None], dict[str, Reach]]:
    """Forward one token through transformers' own cache and read what each layer stores: right for any model.

    Returns:
        Each layer's shape, None if it stores nothing; and how far layers of each type see, where that is bounded. The
        type is "" in a model that takes one mask for all of its layers.

    Raises:
        UserError: a layer keeps something else than keys and values, or the model takes no mask a type.
    """
    probe, reaches = DynamicCache(config=model.config), dict[str, Reach]()
    config = model.config.get_text_config(decoder=True)
    types = layer_types(model)
    for i, layer in enumerate(probe.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            chunked = types[i] == "chunked_attention" if types else getattr(config, "sliding_window", None) is None
            reaches[types[i] if types else ""] = Reach(layer.sliding_window, chunked)
        elif type(layer) not in (DynamicLayer, DummyLayer):
            raise UserError(f"{name}: layer {i} is a {type(layer).__name__}, whose state cannot take back tokens")
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    mask = dict.fromkeys(types) if reaches and types else None
    try:
        model(input_ids=token, attention_mask=mask, past_key_values=probe, use_cache=True)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{name}: does not work with transformers' own cache and masks ({one_line(error)})") from None
    shapes: list[LayerShape | None] = []
    for layer in probe.layers:
        keys, values = layer.keys, layer.values
        if keys is None or values is None:
            shapes.append(None)
        else:
            shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device))
    return shapes, reaches


def layer_types(model: Any) -> tuple[str, ...]:
    """Return the type of each layer, by which a model takes masks; () if it takes one for all."""
    return tuple(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
