"""Refuse models that the engine cannot drive: by rules, and by a trial for all the rest."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError, one_line
from ..rule.tree import Draft, Tree
from .attention import NAME
from .cache import TreeCache

DEFAULT_CONTEXT = 4096
PAST_END = 128  # positions that a draft may take after the context
TRIAL = 12  # tokens of the prompt
TRIAL_ROOM = TRIAL + 6  # a root and five nodes follow the prompt
# Largest allowed logit error in the trial, relative to the row's maximum. At toy size on a CPU,
# float32 families of transformers that the engine drives correctly differed by at most 4e-6, wrong
# ones by 5e-4 or more.
TOLERANCE = 1e-4
TOLERANCE_GPU = 1e-3  # GPUs may multiply float32 in less precision
TOLERANCE_HALF = 0.1
# `forward`'s name of its cache: since transformers 5.24; before it and in hub code; in models of
# recurrent states alone
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside torch.compile's or peft's wrapper; adapters stay active.

    Raises:
        UserError: an adapter that changes the inputs (prompt and prefix tuning), or that acts only
            from some token on (aLoRA).
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            active = model.active_peft_config
            if active.is_prompt_learning or getattr(active, "alora_invocation_tokens", None):
                raise UserError(
                    f"{type(model).__name__}: a {active.peft_type} adapter puts tokens before a"
                    " text, or acts on a part of it; this decoding cannot"
                )
            model = model.get_base_model()
        else:
            return model


def position_limit(model: Any) -> int | None:
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def check_context(model: Any, name: str, context: int | None) -> int:
    """Return the context in tokens; raise UserError if the model has fewer positions."""
    limit = position_limit(model)
    if context is not None and context < 2:
        raise UserError(
            f"{name}: context={context}: must be at least 2, a token of prompt and one of answer"
        )
    if context is not None and limit is not None and context > limit:
        raise UserError(
            f"{name}: context={context} is more than the {limit} positions the model has"
        )
    return context or min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def check_model(model: Any, name: str, context: int | None) -> tuple[int, Collection[str], str]:
    """Refuse by rules what the engine cannot drive.

    Returns:
        The context in tokens, the names of `forward`'s parameters, and the cache's name among them.
    """
    context = check_context(model, name, context)
    head = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(head, Tensor):
        raise UserError(
            f"{name}: has no head with a tensor of weights; after torch's quantize_dynamic its"
            " products would depend on the draft: use another quantization"
        )
    if (rows := head.shape[0]) > (ids := model.get_input_embeddings().weight.shape[0]):
        raise UserError(
            f"{name}: its head has {rows} rows, its embedding {ids}: a draft may hold ids it cannot"
            " read"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"{name}: an encoder-decoder model; the engine decodes causal language models only"
        )
    check_training(model, name)
    kernel = getattr(model.config, "_attn_implementation", "sdpa")
    if kernel not in ("sdpa", "eager", NAME):
        raise UserError(
            f"{name}: attention {kernel!r} takes no tree mask; load with attn_implementation='sdpa'"
        )
    parameters = inspect.signature(model.forward).parameters
    cache = next((known for known in CACHE_NAMES if known in parameters), "")
    # Models of recurrent states alone read tokens one after the other and take no positions
    positions = "position_ids" in parameters or getattr(model, "_is_stateful", False)
    for needed, is_parameter in {"position_ids": positions, "cache": cache}.items():
        if not is_parameter:
            raise UserError(
                f"{name}: {type(model).__name__}.forward takes no {needed}, which a draft tree"
                " needs"
            )
    check_positions(model.config, name, context)
    check_cache_indices(model.config.get_text_config(), name, context)
    return context, parameters.keys(), cache


def check_training(model: Any, name: str) -> None:
    if not model.training:
        return
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            what = "gradient checkpointing, which keeps no cache"
        elif module.training and any(
            (name == "p" or "dropout" in name) and isinstance(value, float) and value > 0
            for name, value in vars(module).items()
        ):
            what = "dropout, which makes answers random"
        else:
            continue
        raise UserError(f"{name}: is in training mode with {what}; call eval()")


def check_positions(config: Any, name: str, context: int) -> None:
    """Refuse positions that depend on the longest one in a forward: a draft would change the root.

    transformers' `longrope` takes other frequencies for the whole forward once a position is beyond
    the length it was first trained with (modeling_rope_utils, longrope_frequency_update).
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        limit = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "longrope" and limit is not None and context > limit:
            raise UserError(
                f"{name}: its positions (longrope) are others once a text passes {limit} tokens, so"
                f" that drafts would change what the model says; set the context to {limit} or less"
            )


def check_cache_indices(config: Any, name: str, context: int) -> None:
    """Refuse attention that uses cache indices as positions; siblings sit in consecutive slots.

    GPT-Neo, Doge and Llama 4 do so beyond a window. The trial finds what always does so, such as
    ALiBi.
    """
    local = (
        getattr(config, "window_size", None)
        if "local" in getattr(config, "attention_layers", ())
        else None
    )
    scaled = config.floor_scale if getattr(config, "attn_temperature_tuning", False) else None
    for window in (local, getattr(config, "keep_window_size", None), scaled):
        if window is not None and (limit := window - PAST_END) < context:
            advice = f"set the context to {limit} or less" if limit > 1 else "too few for drafts"
            raise UserError(
                f"{name}: its attention uses cache indices as positions beyond {window}, drafts"
                f" included; {advice}"
            )


@contextmanager
def refusing_errors(name: str) -> Iterator[None]:
    """Refuse a model whose forward fails on our cache or masks."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model's code may raise any kind
        reason = one_line(error) or type(error).__name__
        raise UserError(
            f"{name}: does not work with transformers' own cache and masks ({reason})"
        ) from None


def check_draft(target: Any, cache: TreeCache) -> None:
    """Refuse a `Target` whose logits of a small tree differ from plain ones by more than rounding.

    This finds what no rule foresees, such as attention that reads a prompt in both directions.
    """
    tokens = min(TRIAL, target.context - 3)  # the root and two nodes follow
    if tokens > 0:
        with refusing_errors(target.name), torch.inference_mode():
            check_error(target, *_trial(target, cache, tokens), "a draft's nodes")


def _trial(target: Any, cache: TreeCache, tokens: int) -> tuple[Tensor, Tensor]:
    """Return a tree's logits (2, 3, V) by path, and the texts (2, tokens + 3) that end in these."""
    prompt = [(3 + 7 * i) % min(97, target.vocab_size) for i in range(tokens)]
    root, *drafted = ((5 + 11 * i) % min(97, target.vocab_size) for i in range(5))
    paths = [root, drafted[0], drafted[2]], [root, drafted[1], drafted[3]]
    target.prefill(cache, [*prompt, root])
    if target.recurrent:  # the first path is rejected, then the second one is read
        first = target.forward(cache, Draft(Tree.chain(2), torch.tensor(paths[0]))).logits
        cache.commit([0])
        second = target.forward(cache, Draft(Tree.chain(1), torch.tensor(paths[1][1:]))).logits
        by_path = torch.stack((first, torch.cat((first[:1], second))))
    else:
        draft = Draft(Tree([0, 0, 0, 1, 2]), torch.tensor([root, *drafted], device=target.device))
        cache.cursor.ahead = target.context + PAST_END  # the most that a cache may ever hold
        by_path = target.forward(cache, draft).logits[torch.tensor([[0, 1, 3], [0, 2, 4]])]
    return by_path, torch.tensor([prompt + path for path in paths], device=target.device)


def check_error(target: Any, logits: Tensor, texts: Tensor, what: str) -> None:
    """Refuse logits (t, m, V) unlike a plain forward's of the texts' (t, P) last m tokens."""
    plain = target.model(input_ids=texts, use_cache=False).logits[:, -logits.shape[1] :].float()
    finite = plain.isfinite().all(-1)  # a model may overflow by itself
    # logits may all be 0
    greatest = plain.abs().amax(-1).clamp(min=torch.finfo(plain.dtype).tiny)
    errors = ((logits.float() - plain).abs().amax(-1) / greatest)[finite].nan_to_num(float("inf"))
    error = max(errors.tolist(), default=0.0)
    tolerance = TOLERANCE if target.device.type == "cpu" else TOLERANCE_GPU
    if error > (tolerance if target.dtype == torch.float32 else TOLERANCE_HALF):
        raise UserError(
            f"{target.name}: logits of {what} are {error:.2g} of the greatest away from those of"
            " the same tokens in a row, so that drafts would change what the model says"
        )
