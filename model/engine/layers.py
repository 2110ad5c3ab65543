"""What the layers of a model store and see, and what of it the engine cannot drive."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

from ..errors import UserError, one_line
from .cache import LayerShape
from .kernels import SDPA_GROUPED

# Kinds of transformers' layers that the engine can drive, by name, as older versions lack some.
WINDOWED = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
ATTENTION = ("DynamicLayer", "DynamicIndexedLayer", "DummyLayer", *WINDOWED)
DRIVEN = (*ATTENTION, "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
PAST_END = 1024  # places behind the context that a draft may take
TRIED = (5, 24)  # the newest version of transformers that the tests passed with
# What `forward` calls its cache: since transformers 5.24; before it, and in code from a hub; of recurrent states alone
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


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


@cache
def warn_untried(version: str = transformers.__version__) -> None:
    """Warn once a process if transformers is newer than what was tried; each model's trial decides if it works."""
    if tuple(map(int, version.split(".")[:2])) > TRIED:
        newest = ".".join(map(str, TRIED))
        logging.getLogger(__name__).warning("transformers %s is newer than %s, the newest tried here", version, newest)


def check_training(model: Any, name: str) -> None:
    """Refuse a model that keeps no cache because it is being trained with gradient checkpointing."""
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise UserError(f"{name}: is in training mode with gradient checkpointing, which keeps no cache; call eval()")


def check_forward(model: Any, name: str) -> tuple[Collection[str], str]:
    """Refuse what the engine cannot drive; return the names of what `forward` takes, and the cache's among them."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name}: an encoder-decoder model; the engine decodes causal language models only")
    check_training(model, name)
    kernel = getattr(model.config, "_attn_implementation", "sdpa")
    if kernel not in ("sdpa", "eager", SDPA_GROUPED):
        raise UserError(f"{name}: attention {kernel!r} takes no tree mask; load with attn_implementation='sdpa'")
    takes = inspect.signature(model.forward).parameters
    cache = next((known for known in CACHE_NAMES if known in takes), "")
    # Of what reads tokens one after the other, models of recurrent states alone take no positions
    positions = "position_ids" in takes or getattr(model, "_is_stateful", False)
    for needed, taken in {"position_ids": positions, "cache": cache}.items():
        if not taken:
            raise UserError(f"{name}: {type(model).__name__}.forward takes no {needed}, which a draft tree needs")
    return takes.keys(), cache


@contextmanager
def works_with_ours(name: str) -> Iterator[None]:
    """Refuse by name a model whose forward fails on a cache or on masks of the kinds that it is given here."""
    try:
        yield
    except UserError:
        raise
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        says = one_line(error) or type(error).__name__
        raise UserError(f"{name}: does not work with transformers' own cache and masks ({says})") from None


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

    ALiBi does; windows of GPT-Neo's local layers, Doge's dynamic mask and Llama 4's temperature do once a text is
    longer.
    """
    if getattr(config, "alibi", False):
        raise UserError(f"{name}: ALiBi counts places in the cache, where a draft's siblings follow one another")
    local = getattr(config, "window_size", None) if "local" in getattr(config, "attention_layers", ()) else None
    scaled = config.floor_scale - PAST_END if getattr(config, "attn_temperature_tuning", False) else None
    for window in (local, getattr(config, "keep_window_size", None), scaled):
        if window is not None and window < context:
            raise UserError(
                f"{name}: its attention counts places in the cache once a text is longer than {window} tokens; set the "
                f"context to {window} or less"
            )


@torch.inference_mode()
def probe_layers(
    model: Any, name: str, device: torch.device, cache_name: str
) -> tuple[list[LayerShape | None], dict[str, Reach], list[int]]:
    """Forward one token through transformers' own cache and read what each layer stores: right for any model.

    Returns:
        Each layer's shape of keys and values, None if it stores none. How far layers of each type see, where that is
        bounded; the type is "" in a model that takes one mask for all of its layers. And how many recurrent states
        each layer has, empty if none has any.

    Raises:
        UserError: a layer keeps something else, or the model takes no mask a type.
    """
    probe, reaches = DynamicCache(config=model.config), dict[str, Reach]()
    config = model.config.get_text_config(decoder=True)
    types = layer_types(model)
    for i, layer in enumerate(probe.layers):
        if type(layer).__name__ not in DRIVEN:
            raise UserError(f"{name}: layer {i} is a {type(layer).__name__}, from which tokens cannot be taken back")
        if type(layer).__name__ in WINDOWED:
            chunked = types[i] == "chunked_attention" if types else getattr(config, "sliding_window", None) is None
            reaches[types[i] if types else ""] = Reach(layer.sliding_window, chunked)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    states = [getattr(layer, "number_of_states", 0) for layer in probe.layers]
    mask = dict.fromkeys(types) if reaches and types and not any(states) else None  # chains go without masks
    with works_with_ours(name):
        model(input_ids=token, attention_mask=mask, use_cache=True, **{cache_name: probe})
    shapes: list[LayerShape | None] = []
    for layer in probe.layers:
        keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
        if keys is None or values is None:  # an empty attention layer looks at pictures alone
            empty = type(layer).__name__ == "DynamicLayer"
            shapes.append(LayerShape(0, 0, 0, model.dtype, device) if empty else None)
        else:
            index_keys = getattr(layer, "indexer_keys", None)  # (1, 1, index_dim)
            dims = keys.shape[1], keys.shape[3], values.shape[3]
            shapes.append(LayerShape(*dims, keys.dtype, keys.device, 0 if index_keys is None else index_keys.shape[-1]))
    return shapes, reaches, states if any(states) else []


def layer_types(model: Any) -> tuple[str, ...]:
    """Return the type of each layer, by which a model takes masks; () if it takes one for all."""
    return tuple(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())


def form_of(model: Any) -> tuple[Any, ...]:
    """What is known of a model for good: its attention, and each weight's shape, type and device.

    On CUDA its address, too, which captured steps have been given.
    """
    attention = model.config.get_text_config()._attn_implementation
    attention = "sdpa" if attention == SDPA_GROUPED else attention  # for a moment, by another model of the same config
    weights = ((w.shape, w.dtype, w.device, w.data_ptr() if w.is_cuda else 0) for w in model.parameters())
    return (attention, *weights)
