"""transformers' generation settings, one by one: what this decoding does with each, and what it refuses by name."""

from __future__ import annotations

from typing import Any

import torch

from .errors import UserError

# What transformers makes of these before the loop (prompt, lengths, processors, criteria), or the loop reads itself.
HONOURED = {
    "bos_token_id": "the prompt where there is none",
    "max_length": "length",
    "max_new_tokens": "length",
    "min_length": "processor",
    "min_new_tokens": "processor",
    "eos_token_id": "criterion, and processors",
    "max_time": "criterion",
    "stop_strings": "criterion; needs a tokenizer, which transformers asks for by name",
    "token_healing": "the prompt; needs a tokenizer, too",
    "do_sample": "the loop",
    "temperature": "processor",
    "top_k": "processor",
    "top_p": "processor",
    "top_h": "processor",
    "min_p": "processor",
    "typical_p": "processor",
    "epsilon_cutoff": "processor",
    "eta_cutoff": "processor",
    "repetition_penalty": "processor",
    "encoder_repetition_penalty": "processor",
    "no_repeat_ngram_size": "processor",
    "encoder_no_repeat_ngram_size": "processor",
    "bad_words_ids": "processor",
    "sequence_bias": "processor",
    "suppress_tokens": "processor",
    "begin_suppress_tokens": "processor",
    "forced_bos_token_id": "processor",
    "forced_eos_token_id": "processor",
    "exponential_decay_length_penalty": "processor",
    "remove_invalid_values": "processor",
    "renormalize_logits": "processor",
    "return_dict_in_generate": "the loop",
}

# What decides no token of one sequence that is decoded here.
IRRELEVANT = {
    "pad_token_id": "one sequence has no padding",
    "decoder_start_token_id": "encoder-decoder models are refused",
    "use_cache": "the cache is this decoding's own",
    "cache_config": "of a quantized cache, which is refused",
    "max_cache_len": "of transformers' static cache",
    "compile_config": "how transformers compiles its own forward",
    "disable_compile": "how transformers compiles its own forward",
    "continuous_batching_config": "of generate_batch",
    "early_stopping": "of beams, which are refused",
    "length_penalty": "of beams",
    "diversity_penalty": "of groups of beams, which are refused",
    "low_memory": "of contrastive search, which is refused",
    "assistant_confidence_threshold": "of transformers' own drafting, which is refused",
    "assistant_ensemble_weight": "of transformers' own drafting",
    "assistant_lookbehind": "of transformers' own drafting",
    "target_lookbehind": "of transformers' own drafting",
    "num_assistant_tokens": "of transformers' own drafting",
    "num_assistant_tokens_schedule": "of transformers' own drafting",
    "max_matching_ngram_size": "of transformers' own drafting",
    "transformers_version": "says who wrote the settings",
}

# What is refused, and the values by which it is not asked for.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1),
    "watermarking_config": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "speculation_type": (None,),
    "is_assistant": (None, False),
    "prefill_chunk_size": (None,),
    "cache_implementation": (None, "dynamic", "hybrid", "static", "offloaded", "offloaded_static"),  # all but quantized
}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")  # refused with a dictionary

# Inputs of the model that `generate` prepares, and what is checked of them below.
INPUTS = ("attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache", "logits_to_keep")
PREPARED = (*INPUTS, "cache_position", *OUTPUTS)


def refuse(model: Any, input_ids: torch.Tensor, config: Any, kwargs: dict[str, Any]) -> None:
    """Refuse by name whatever is asked of `generate` that changes its output and that this decoding does not do.

    A setting of a newer transformers that this file does not know is refused as soon as it is used.

    Args:
        input_ids: (B, P).
        config: the GenerationConfig of the call.
        kwargs: what `generate` hands to the model.

    Raises:
        UserError: what there is of it.
    """
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    known = HONOURED.keys() | IRRELEVANT.keys() | REFUSED.keys() | set(OUTPUTS)
    names = [name for name in vars(type(config)()) if not name.startswith("_")]  # others are a checkpoint's own remarks
    new = {name: getattr(config, name) not in (None, defaults.get(name)) for name in names if name not in known}
    cache, positions, mask = (kwargs.get(name) for name in ("past_key_values", "position_ids", "attention_mask"))
    cannot = {
        "a batch of several sequences": input_ids.shape[0] > 1,
        **{name: getattr(config, name, None) not in idle for name, idle in REFUSED.items()},
        **{name: bool(config.return_dict_in_generate and getattr(config, name, False)) for name in OUTPUTS},
        **new,
        "padding (attention_mask)": mask is not None and not bool((mask == 1).all()),
        "past_key_values": cache is not None and cache.get_seq_length() > 0,
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,
        "position_ids": positions is not None and not _counted(positions),
        **{name: value is not None for name, value in kwargs.items() if name not in PREPARED},
        "inputs prepared by another object (prompt tuning)": _prepared_elsewhere(model),
    }
    if asked := [name for name, wanted in cannot.items() if wanted]:
        raise UserError(f"custom_generate: this decoding has no {', '.join(asked)}; leave it out")


def _counted(positions: torch.Tensor) -> bool:
    """Whether positions (..., P) are 0, 1, 2, ..."""
    return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())


def _prepared_elsewhere(model: Any) -> bool:
    """Whether an adapter prepares the model's inputs, as peft's prompt tuning does; this loop prepares its own."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    adapter = getattr(prepare, "__self__", None)
    return bool(getattr(getattr(adapter, "active_peft_config", None), "is_prompt_learning", False))
