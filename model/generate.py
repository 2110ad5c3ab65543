"""This project's decoding inside transformers' own `generate`: `model.generate(..., custom_generate=Generate())`.

transformers prepares inputs, processors and criteria as ever, and hands the decoding loop over.
"""

from __future__ import annotations

import weakref
from contextlib import closing
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .engine import Drafter, Target, decode
from .engine.devices import turns_of
from .engine.linear import unpack_linears
from .engine.sampling import Sampling
from .engine.target import unwrapped
from .errors import UserError
from .methods import DEFAULT, make_method
from .tuning import choose_execution, choose_linear

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


CONTEXT_STEP = 1024  # a target's context is a multiple of this
ATTRIBUTE = "_token_recycling"  # of a model: holds its `ModelState`


class ModelTarget(Target):
    """A target kept with its model, which it references weakly: a cycle would outlive its last user."""

    @property
    def model(self) -> Any:
        return self._model()

    @model.setter
    def model(self, model: Any) -> None:
        self._model = weakref.ref(model)


class ModelState:
    """State kept with a model: its targets, and the drafters made for it. A copy of the model gets none of it."""

    def __init__(self) -> None:
        self.targets: dict[str, Target] = {}  # by `linear`
        self.drafters: WeakKeyDictionary[Generate, tuple[Target, Drafter]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[ModelState], tuple[()]]:
        """For deep copies and pickles."""
        return ModelState, ()


class Generate:
    """A decoding method for `custom_generate`. What it learns is kept between calls, separately for each model.

    Greedy output is the model's own. With `do_sample` each token is drawn from the distribution that transformers'
    processors leave, by noise that belongs to the token's place, so it is not torch's own draw but has its shares;
    `torch.manual_seed` decides it.

    Threads may share it, and the model: each answer is what it is alone, also next to calls without it. They take turns
    by steps, so that several answers at once are no faster than one after the other. Each has a cache of its own.

    transformers (5.23) keeps some arguments from a callable: `streamer` (give `token_streamer`, too) and `tokenizer`,
    so that `stop_strings` becomes `stopping_criteria=[StopStringCriteria(tokenizer, [...])]`. Criteria get no scores.
    An `assistant_model` is not seen and does nothing.

    Args:
        method: a name of `methods.METHODS`; settings are its own.
        start: hot, or cold: what was learnt is forgotten before each call.
        execution: as `Decoder` has it.
        linear: torch leaves the model as it is. auto, onednn and fused change the layout of its linear layers, for all
            users of the model, until `release`.

    Raises:
        UserError: when called, for what it cannot do (several sequences, beams, padding, scores), by name: see
            `generate_settings`.
    """

    def __init__(
        self,
        method: str = DEFAULT,
        *,
        start: str = "hot",
        execution: str = "auto",
        linear: str = "torch",
        **settings: Any,
    ) -> None:
        if start not in ("hot", "cold"):
            raise UserError(f"start={start}: must be hot or cold")
        self.method, self.start, self.settings = method, start, settings
        self.execution, self.linear = execution, linear

    def release(self, model: Any) -> None:
        """Give a model's linear layers their own layout back, and forget what was made for it."""
        model = unwrapped(model)
        with turns_of(model):
            unpack_linears(model)
            vars(model).pop(ATTRIBUTE, None)

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        token_streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' contract of a decoding method: ids (1, P) -> (1, P + new), or its output class.

        Args:
            token_streamer: what else would be `streamer`, which transformers (5.23) hands to no callable: give it the
                same object as both; the prompt goes to the one, and what is new to the other.
        """
        config = generation_config
        refuse(model, input_ids, config, kwargs)
        prompt = input_ids[0].tolist()
        with turns_of(model):
            target = target_of(model, config.max_length, self.linear)
            execution = choose_execution(target, self.execution)
            drafter = self._drafter(model, target)
            if self.start == "cold":
                drafter.reset()
            session = drafter.session()
        processors = (logits_processor,) if logits_processor else ()
        temperature = 1.0 if config.do_sample else 0.0  # a temperature of the caller's is one of the processors
        seed = int(torch.randint(1 << 62, (1,))) if config.do_sample else 0
        sampling = Sampling(temperature=temperature, seed=seed, processors=processors)
        steps = decode(
            target,
            session,
            prompt,
            max_new_tokens=config.max_length - len(prompt),
            eos=ended_by(config),
            sampling=sampling,
            execution=execution.under(sampling),
        )
        ids = input_ids
        with closing(steps):
            for step in steps:
                streamed = []
                for token in step.tokens:
                    streamed.append(token)
                    ids = torch.cat((ids, torch.tensor([[token]], device=ids.device)), dim=1)
                    if bool(stopping_criteria(ids, None).all()):
                        steps.close()
                        break
                for token in streamed if token_streamer is not None else ():
                    token_streamer.put(torch.tensor([token]))
        if token_streamer is not None:
            token_streamer.end()
        if not config.return_dict_in_generate:
            return ids
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=ids)

    def _drafter(self, model: Any, target: Target) -> Drafter:
        """Return this method's drafter for a model; a new one for a new target inherits its state."""
        state: ModelState = vars(model)[ATTRIBUTE]
        drafters = state.drafters
        drafter_target, drafter = drafters.get(self, (None, None))
        if drafter_target is not target:
            new = make_method(self.method, target, **dict(self.settings))
            if drafter is not None and new.stateful:
                new.load_state_dict(drafter.state_dict())
            drafters[self], drafter = (target, new), new
        assert drafter is not None
        return drafter


def ended_by(config: Any) -> set[int]:
    """Return the ids that end the text; the loop needs them so that no method learns what follows them."""
    ids = config.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def target_of(model: Any, length: int, linear: str = "torch") -> Target:
    """Return the model's target for texts of so many tokens; made once and kept with the model.

    Made anew if the text is longer than its context, or the model has changed: copied, resized, moved, cast, with
    other layers or attention. Call it in a turn of the model's.

    Args:
        linear: as `tuning.choose_linear` takes it, where a target is made.

    Raises:
        UserError: more than the model's positions, or a model that the engine cannot drive.
    """
    state: ModelState = vars(model).get(ATTRIBUTE, ModelState())
    if any(target.model is not model or target.changed for target in state.targets.values()):
        state = ModelState()
    if linear in state.targets and state.targets[linear].context >= length:
        return state.targets[linear]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = -(-length // CONTEXT_STEP) * CONTEXT_STEP
    context = context if limit is None or length > limit else min(context, limit)
    state.targets[linear] = ModelTarget(model, context=context, linear=choose_linear(unwrapped(model), linear))
    object.__setattr__(model, ATTRIBUTE, state)  # not by Module.__setattr__, which looks for parameters in it
    return state.targets[linear]
