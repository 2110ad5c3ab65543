"""Which settings of transformers' GenerationConfig apply, and which are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .engine import Sampling, Target
from .errors import UserError, one_line

DRAWN = "a processor when sampling"
PROCESSOR = "a processor"
OUTPUT = "an output next to the tokens"
FREE = "read by transformers or the loop, or of no effect on the tokens here"
# Each setting's part in decoding. A tuple: it is refused unless its value is one of these
SETTINGS: dict[str, str | tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "temperature",
            "top_k",
            "top_p",
            "top_h",
            "min_p",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
        ),
        DRAWN,
    ),
    **dict.fromkeys(
        (
            "min_length",
            "min_new_tokens",
            "repetition_penalty",
            "encoder_repetition_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "bad_words_ids",
            "sequence_bias",
            "suppress_tokens",
            "begin_suppress_tokens",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "exponential_decay_length_penalty",
            "remove_invalid_values",
            "renormalize_logits",
        ),
        PROCESSOR,
    ),
    **dict.fromkeys(
        ("output_scores", "output_logits", "output_attentions", "output_hidden_states"), OUTPUT
    ),
    **dict.fromkeys(
        (
            "bos_token_id",
            "token_healing",
            "max_length",
            "max_new_tokens",
            "eos_token_id",
            "max_time",
            "stop_strings",
            "do_sample",
            "return_dict_in_generate",
            "pad_token_id",
            "decoder_start_token_id",
            "continuous_batching_config",
            "low_memory",
            "transformers_version",
            "use_cache",
            "cache_config",
            "max_cache_len",
            "compile_config",
            "disable_compile",
            "early_stopping",
            "length_penalty",
            "diversity_penalty",
            "assistant_confidence_threshold",
            "assistant_ensemble_weight",
            "assistant_lookbehind",
            "target_lookbehind",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "max_matching_ngram_size",
        ),
        FREE,
    ),
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), (None, 1)
    ),
    **dict.fromkeys(
        (
            "dola_layers",
            "constraints",
            "force_words_ids",
            "watermarking_config",
            "prompt_lookup_num_tokens",
            "assistant_early_exit",
            "speculation_type",
            "prefill_chunk_size",
        ),
        (None,),
    ),
    **dict.fromkeys(("use_mtp", "is_assistant", "penalty_alpha"), (None, False)),
    # all but quantized
    "cache_implementation": (None, "dynamic", "hybrid", "static", "offloaded", "offloaded_static"),
}


def named(part: str) -> list[str]:
    return [name for name, its in SETTINGS.items() if its == part]


def changed(config: Any, names: Iterable[str]) -> dict[str, Any]:
    defaults: dict[str, Any] = (
        vars(type(config)()) | getattr(config, "_get_default_generation_params", dict)()
    )
    settings = {}
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, Tensor) or value not in (None, defaults.get(name)):
            settings[name] = value
    return settings


def refused(config: Any) -> dict[str, Any]:
    settings = {}
    for name, allowed in SETTINGS.items():
        value = getattr(config, name, None)
        if isinstance(allowed, tuple) and value not in allowed:
            settings[name] = value
    # transformers' own fields; others are notes of a checkpoint
    fields = [name for name in vars(type(config)()) if not name.startswith("_")]
    return settings | changed(config, [name for name in fields if name not in SETTINGS])


def not_applied(config: Any, tokenizer: Any) -> str:
    """Return in words which settings of a model's GenerationConfig `Decoder` does not apply."""
    names = ["token_healing"]
    if config.do_sample:
        names = ["do_sample", *named(DRAWN), *names]
    if tokenizer is None:
        names.append("stop_strings")
    settings = changed(config, names) | refused(config)
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def with_own_settings(
    sampling: Sampling, target: Target, ids: list[int], max_new_tokens: int, eos: Collection[int]
) -> tuple[Sampling, list[Any]]:
    """Add the processors of the model's own GenerationConfig, as transformers makes them.

    Returns:
        The sampling, and the config's criteria (`max_time`), stop strings left out.
    """
    prepared = dict[str, Any]()
    settings = changed(target.model.generation_config, (*named(PROCESSOR), "max_time"))
    if not settings:
        return sampling, []

    def prepare(model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        prepared.update(kwargs)
        return input_ids

    if sampling.repetition_penalty != 1:  # the caller's replaces it
        settings["repetition_penalty"] = 1.0

    settings |= dict(eos_token_id=sorted(eos), pad_token_id=0, max_new_tokens=max_new_tokens)
    prompt = torch.tensor([ids], device=target.device)
    # a shallow copy, so that `generate` applies no setting but these
    model = copy.copy(target.model)
    try:
        model.generation_config = type(model.generation_config)(**settings)
        model.generate(prompt, custom_generate=prepare, attention_mask=torch.ones_like(prompt))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{target.name}: its generation_config is refused ({one_line(error)[:200]})"
        ) from None

    criteria = undecided(prepared["stopping_criteria"], len(ids) + max_new_tokens, eos)
    processors = (*prepared["logits_processor"], *sampling.processors)
    return replace(sampling, processors=processors), criteria


def undecided(criteria: Iterable[Any], max_length: int, eos: Collection[int]) -> list[Any]:
    """Return the criteria that the loop does not decide; each costs a GPU transfer per token."""
    from transformers.generation import EosTokenCriteria, MaxLengthCriteria

    def decided(criterion: Any) -> bool:
        if type(criterion) is EosTokenCriteria:
            return set(criterion.eos_token_id.tolist()) <= set(eos)
        return type(criterion) is MaxLengthCriteria and criterion.max_length >= max_length

    return [criterion for criterion in criteria if not decided(criterion)]


def ends_by(criteria: list[Any], device: torch.device) -> Callable[[list[int]], bool] | None:
    """Return `Request.ends`: True if a criterion ends a text; None without criteria."""
    from transformers.generation import StoppingCriteriaList

    if not criteria:
        return None
    listed = StoppingCriteriaList(criteria)
    return lambda text: bool(listed(torch.tensor([text], device=device), None).all())


def eos_ids(ids: Any) -> frozenset[int]:
    """Return the ids of an `eos_token_id`: None, one or several, in any container."""
    if ids is None:
        return frozenset()
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    listed = np.ravel(list(ids) if isinstance(ids, Set) else ids)
    if listed.size and listed.dtype.kind not in "iu":
        raise UserError(f"eos={ids}: must be a token id, or several")
    return frozenset(listed.tolist())
