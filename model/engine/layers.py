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
from .cache import LayerShape, TreeCache
from .kernels import SDPA_GROUPED
from .tree import Draft, Tree

# Kinds of transformers' layers that the engine can drive, by name, as older versions lack some.
WINDOWED = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
ATTENTION = ("DynamicLayer", "DynamicIndexedLayer", "DummyLayer", *WINDOWED)
DRIVEN = (*ATTENTION, "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
PAST_END = 128  # places behind the context that a draft may take
TRIAL = 12  # tokens of the prompt
TRIAL_ROOM = TRIAL + 6  # behind the prompt a root and five nodes
# Of a row's greatest logit, what a draft and a row of the same tokens may differ by in that trial. At toy size, float32
# families of transformers that are driven rightly differed by 4e-6 at most on a CPU, and wrong ones by 5e-4 or more.
APART, APART_GPU, APART_HALF = 1e-4, 1e-3, 0.1  # GPUs may multiply float32 in less precision
TRIED = (5, 24)  # the newest version of transformers that the tests passed with
# What `forward` calls its cache: since transformers 5.24; before it, and in code from a hub; of recurrent states alone
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
OWN_HOOKS = f"{__package__}.target"  # the module whose hook stores hidden states


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


def device_of(model: Any) -> torch.device:
    """Return the device of a model's inputs; of offloaded embeddings that on which accelerate's hook runs them."""
    embeddings = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    hook = getattr(embeddings, "_hf_hook", None)
    return torch.device(hook.execution_device) if device.type == "meta" and hook is not None else device


def is_compiled(module: Any) -> bool:
    """True if its owner had a module's forward compiled in place."""
    forward = vars(module).get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


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
    scaled = config.floor_scale if getattr(config, "attn_temperature_tuning", False) else None
    for window in (local, getattr(config, "keep_window_size", None), scaled):
        if window is not None and (most := window - PAST_END) < context:
            advice = f"set the context to {most} or less" if most > 1 else "too few for drafts"
            raise UserError(
                f"{name}: its attention counts places in the cache beyond {window}, drafts included; {advice}"
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


@torch.inference_mode()
def try_draft(target: Any, cache: TreeCache) -> None:
    """Compare the logits of a small tree with those of a plain forward over each of its two texts.

    It guards what no rule foresees, such as attention that reads a prompt in both directions, or the cache's length
    instead of positions: the cache says to hold as much as it ever may.

    Args:
        target: a `Target`.
        cache: an empty one of the target's, for TRIAL_ROOM tokens.

    Raises:
        UserError: they differ by more than rounding explains.
    """
    places = min(TRIAL, target.context - 3)  # the root and two nodes follow
    if places < 1:
        return
    prompt = [(3 + 7 * i) % min(97, target.vocab_size) for i in range(places)]
    root, *guesses = ((5 + 11 * i) % min(97, target.vocab_size) for i in range(5))
    paths = [root, guesses[0], guesses[2]], [root, guesses[1], guesses[3]]
    target.prefill(cache, [*prompt, root])
    if target.recurrent:  # the first path is rejected, and the second one read after it
        first = target.forward(cache, Draft(Tree.chain(2), torch.tensor(paths[0])))
        cache.commit(1)
        second = target.forward(cache, Draft(Tree.chain(1), torch.tensor(paths[1][1:])))
        drafted = torch.stack((first, torch.cat((first[:1], second))))
    else:
        draft = Draft(Tree([0, 0, 0, 1, 2], once=True), torch.tensor([root, *guesses], device=target.device))
        cache.place.ahead = target.context + PAST_END
        drafted = target.forward(cache, draft)[torch.tensor([[0, 1, 3], [0, 2, 4]])]
    drafted = drafted.float()  # (2, 3, V)
    texts = torch.tensor([prompt + path for path in paths], device=target.device)
    plain = target.model(input_ids=texts, use_cache=False).logits[:, -3:].float()
    finite = plain.isfinite().all(-1)  # a model may overflow by itself
    gaps = ((drafted - plain).abs().amax(-1) / plain.abs().amax(-1))[finite].nan_to_num(float("inf"))
    apart = max(gaps.tolist(), default=0.0)
    limit = APART_HALF if target.dtype != torch.float32 else APART if target.device.type == "cpu" else APART_GPU
    if apart > limit:
        raise UserError(
            f"{target.name}: logits of a draft's nodes are {apart:.2g} of the greatest away from those of the same "
            "tokens in a row, so that drafts would change what the model says"
        )


def form_of(model: Any) -> tuple[Any, ...]:
    """What is known of a model for good: its attention, and each weight's shape, type and device.

    On CUDA its address, too, which captured steps have been given.
    """
    attention = model.config.get_text_config()._attn_implementation
    attention = "sdpa" if attention == SDPA_GROUPED else attention  # for a moment, by another model of the same config
    weights = ((w.shape, w.dtype, w.device, w.data_ptr() if w.is_cuda else 0) for w in model.parameters())
    return (attention, *weights)


def mode_of(model: Any) -> str:
    """What decides a model's answers next to its weights: training mode, hooks, and which of peft's adapters act how.

    Hooks by their numbers, without the engine's own.
    """
    modules = list(model.modules())
    hooks = [{**module._forward_hooks, **module._forward_pre_hooks} for module in modules]
    theirs = [n for given in hooks for n, hook in given.items() if getattr(hook, "__module__", "") != OWN_HOOKS]
    layers = [module for module in modules if hasattr(type(module), "merged_adapters")]
    adapters = [(layer.active_adapters, layer.disable_adapters, getattr(layer, "scaling", None)) for layer in layers]
    return repr((model.training, theirs, adapters))
