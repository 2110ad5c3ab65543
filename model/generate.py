"""Decoding inside transformers' own `generate`: `custom_generate=Generate()`.

transformers prepares everything else.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from .engine import Drafter, Target, decode
from .engine.answer import Generation, Request, StepRecord
from .engine.batch import decode_batch
from .engine.checks import CACHE_NAMES, DEFAULT_CONTEXT, position_limit, unwrapped
from .engine.devices import turns_of
from .engine.linear import Layouts, unpack_linears
from .engine.loop import exhaust
from .engine.sampling import Sampling, drawn_by
from .errors import UserError, one_line
from .methods import DEFAULT, make_method
from .tuning import Execution, choose_execution, choose_linear

logger = logging.get_logger(__name__)
# Settings of a GenerationConfig that transformers turns into processors: DRAWS only when sampling,
# PROCESSORS always
DRAWS = (
    "temperature",
    "top_k",
    "top_p",
    "top_h",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
PROCESSORS = (
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
)
# Settings that transformers turns into the prompt or criteria, or that the loop reads itself
READ = (
    "bos_token_id",
    "token_healing",
    "max_length",
    "max_new_tokens",
    "eos_token_id",
    "max_time",
    "stop_strings",
    "do_sample",
    "return_dict_in_generate",
)
# Settings that change no token here: padding, caches, compilation, and details of refused features
IRRELEVANT = (
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
)
# Refused settings, and the values that turn them off.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), (None, 1)
    ),
    **dict.fromkeys(
        ("dola_layers", "constraints", "force_words_ids", "watermarking_config"), (None,)
    ),
    **dict.fromkeys(
        ("prompt_lookup_num_tokens", "assistant_early_exit", "speculation_type"), (None,)
    ),
    **dict.fromkeys(("use_mtp", "is_assistant"), (None, False)),
    "prefill_chunk_size": (None,),
    "penalty_alpha": (None, 0),
    # all but quantized
    "cache_implementation": (
        None,
        "dynamic",
        "hybrid",
        "static",
        "offloaded",
        "offloaded_static",
    ),
}
# Processors and criteria that a batch may have: they read only a text's ids. Others know the padded
# prompts' length.
READ_IDS = (
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "TemperatureLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "LogitNormalization",
    "StopStringCriteria",
    "MaxTimeCriteria",
)
# refused if returning a dict
OUTPUTS = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)

# Inputs of the model that `generate` prepares; some are checked below.
PREPARED = {"attention_mask", "position_ids", "inputs_embeds", "use_cache", "logits_to_keep"}
PREPARED |= {*CACHE_NAMES, "cache_position", *OUTPUTS}


def refuse(model: Any, input_ids: torch.Tensor, config: Any, kwargs: dict[str, Any]) -> None:
    """Raise UserError that names the unsupported settings in use that change the output.

    Unknown settings are named, too.

    Args:
        config: the GenerationConfig of the call.
        kwargs: the arguments that `generate` passes to the model.
    """
    caches = {name: kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None}
    positions = kwargs.get("position_ids")
    mask = kwargs.get("attention_mask")
    if mask is None or mask.shape != input_ids.shape:
        seen = torch.ones_like(input_ids)
    else:
        seen = mask.long()

    padded_left = mask is None or (
        seen.shape == mask.shape and bool((seen.diff() >= 0).all() and (seen[:, -1] == 1).all())
    )
    moved = False
    if positions is not None:
        differ = positions != seen.cumsum(-1).to(positions) - 1
        moved = bool((differ & (seen == 1).to(positions.device)).any())

    names = [*_refused(config)]
    if config.return_dict_in_generate:
        names += [name for name in OUTPUTS if getattr(config, name, False)]
    if not padded_left:
        names.append("padding but on the left (attention_mask)")
    for name, cache in caches.items():
        if any(vars(layer).get("device") is not None for layer in cache.layers):
            names.append(name)

    if kwargs.get("inputs_embeds") is not None:
        names.append("inputs_embeds")
    if moved:
        names.append("position_ids")
    for name, value in kwargs.items():
        if name not in PREPARED and value is not None and value != {}:
            names.append(name)

    if _prepared_elsewhere(model):
        names.append("inputs prepared by another object (prompt tuning)")
    names += _given_by_peft(model)
    if names:
        listed = ", ".join(dict.fromkeys(names))
        raise UserError(f"custom_generate: not supported: {listed}; leave it out")


def changed(config: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the named settings that a GenerationConfig changes.

    Their values differ from transformers' defaults.
    """
    defaults: dict[str, Any] = (
        vars(type(config)()) | getattr(config, "_get_default_generation_params", dict)()
    )
    settings = {}
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, torch.Tensor) or value not in (None, defaults.get(name)):
            settings[name] = value
    return settings


def _refused(config: Any) -> dict[str, Any]:
    """Return the settings in use that are refused.

    They are those of REFUSED, and those that no list above contains.
    """
    listed = {*DRAWS, *PROCESSORS, *READ, *IRRELEVANT, *REFUSED, *OUTPUTS}
    # others are notes of a checkpoint
    fields = [name for name in vars(type(config)()) if not name.startswith("_")]
    values = {name: getattr(config, name, None) for name in REFUSED}
    refused = {name: value for name, value in values.items() if value not in REFUSED[name]}
    return refused | changed(config, [name for name in fields if name not in listed])


def not_applied(config: Any, tokenizer: Any) -> str:
    """Return in words which settings of a model's own GenerationConfig `Decoder` does not apply."""
    settings = changed(config, ("do_sample", *DRAWS) if config.do_sample else ()) | _refused(config)
    settings |= changed(
        config, ("token_healing", *(("stop_strings",) if tokenizer is None else ()))
    )
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def with_own_settings(
    sampling: Sampling, target: Target, ids: list[int], max_new_tokens: int, eos: Collection[int]
) -> tuple[Sampling, list[Any]]:
    """Add the processors of the model's own GenerationConfig.

    They are as transformers prepares them for a prompt.

    Returns:
        The sampling and the config's criteria (`max_time`). The decoder adds stop strings, which
        need a tokenizer.

    Raises:
        UserError: transformers refuses the config's values.
    """
    prepared = dict[str, Any]()
    own = changed(target.model.generation_config, (*PROCESSORS, "max_time"))
    if not own:
        return sampling, []

    def prepare(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        prepared.update(kwargs)
        return input_ids

    if sampling.repetition_penalty != 1:  # the caller's replaces it
        own["repetition_penalty"] = 1.0

    own |= dict(eos_token_id=sorted(eos), pad_token_id=0, max_new_tokens=max_new_tokens)
    prompt = torch.tensor([ids], device=target.device)
    # a shallow copy, so that `generate` applies no setting but these
    model = copy.copy(target.model)
    try:
        model.generation_config = type(model.generation_config)(**own)
        model.generate(prompt, custom_generate=prepare, attention_mask=torch.ones_like(prompt))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{target.name}: its generation_config is refused ({one_line(error)[:200]})"
        ) from None

    criteria = undecided(prepared["stopping_criteria"], len(ids) + max_new_tokens, eos)
    return replace(
        sampling, processors=(*prepared["logits_processor"], *sampling.processors)
    ), list(criteria)


def _prepared_elsewhere(model: Any) -> bool:
    """True if an adapter prepares the model's inputs, as peft's prompt tuning does.

    This loop prepares its own.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    adapter = getattr(prepare, "__self__", None)
    return bool(getattr(getattr(adapter, "active_peft_config", None), "is_prompt_learning", False))


def _given_by_peft(model: Any) -> set[str]:
    """Return the arguments that peft's hooks pass to the layers.

    They fit a call's rows, not a draft tree's.
    """
    names: set[str] = set()
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            function = getattr(hook, "func", hook)
            if str(getattr(function, "__module__", "")).startswith("peft."):
                names.update(getattr(hook, "keywords", ["arguments of peft's layers"]))
    return names


ATTRIBUTE = "_token_recycling"  # attribute of a model that holds its `ModelState`


class ModelTarget(Target):
    """A target that its model holds, and that references the model weakly.

    A cycle would outlive its last user.
    """

    @property
    def model(self) -> Any:
        return self._model()

    @model.setter
    def model(self, model: Any) -> None:
        self._model = weakref.ref(model)


class ModelState:
    """State kept with a model: its targets by `linear`, and the drafters made for it.

    A copy of the model has none.

    A target with copies of weights is freed with the last `Generate` object that has a drafter for
    it.
    """

    def __init__(self) -> None:
        self.targets: WeakValueDictionary[str, Target] = WeakValueDictionary()
        self.without_copies: dict[str, Target] = {}  # those of them that are not freed
        self.drafters: WeakKeyDictionary[Generate, tuple[Target, frozenset[int], Drafter]] = (
            WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple[type[ModelState], tuple[()]]:
        """Return an empty state for deep copies and pickles."""
        return ModelState, ()


class Generate:
    """A decoding method for `custom_generate`.

    What it learns is kept between calls, separately for each model.

    Greedy output is the model's own. With `do_sample`, tokens are drawn with noise keyed by
    position from the distribution that transformers' processors leave: torch's own distribution,
    but other draws. `torch.manual_seed` seeds the noise. Threads may share this object and the
    model, as with `Decoder`.

    transformers (5.24) does not pass `streamer` and `tokenizer` to a callable. Give
    `token_streamer`, too, and instead of `stop_strings` give
    `stopping_criteria=[StopStringCriteria(tokenizer, [...])]`. Criteria get no scores. An
    `assistant_model` is ignored.

    Args:
        method, start, execution, settings: as `Decoder` takes them; `start` is hot or cold.
        context: maximum tokens of prompt and answer together; default: the model's positions. A
            warning is logged if the context ends an answer, where stock `generate` goes on.
        linear: auto packs the weights on a CPU where memory allows; the copies are freed by
            `release` or with this object; see `tuning.choose_linear`. torch leaves the model as it
            is. All other callers use the model's own weights.

    A batch, padded on the left, is decoded in one forward per step; each row is the same as alone.
    The output of `return_dict_in_generate` has the attribute `generations`: each row's
    `Generation`, with its steps.

    Raises:
        UserError: when called, naming what is not supported (beams, scores, other padding).
    """

    def __init__(
        self,
        method: str = DEFAULT,
        *,
        start: str = "hot",
        execution: str = "auto",
        linear: str = "auto",
        context: int | None = None,
        **settings: Any,
    ) -> None:
        if start not in ("hot", "cold"):
            raise UserError(f"start={start}: must be hot or cold")
        if context is not None and (type(context) is not int or context < 2):
            raise UserError(f"context={context}: must be a number of tokens, 2 or more")
        if "eos" in settings:
            raise UserError("eos: is the eos_token_id of `generate`; leave it out")

        self.method = method
        self.start = start
        self.settings = settings
        self.execution = execution
        self.linear = linear
        self.context = context

    def __reduce__(self) -> tuple[partial[Generate], tuple[()]]:
        """Return one with the same settings that has learnt nothing, for copies and pickles."""
        options: dict[str, Any] = dict(
            start=self.start, execution=self.execution, linear=self.linear, context=self.context
        )
        return partial(type(self), self.method, **options, **self.settings), ()

    def release(self, model: Any) -> None:
        """Restore the layout of a model's linear layers, and drop its targets and drafters."""
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
        """Follow transformers' contract of a decoding method.

        Ids (B, P) become (B, P + new), or the output class.

        Args:
            token_streamer: gets the new tokens; the prompt goes to `streamer`, which no callable
                gets (5.24).
        """
        config = generation_config
        refuse(model, input_ids, config, kwargs)
        prompts = unpadded(input_ids, kwargs.get("attention_mask"))
        eos = eos_ids(config.eos_token_id)
        criteria = undecided(stopping_criteria or (), config.max_length, eos)
        batched = len(prompts) > 1
        if batched or len(prompts[0]) < input_ids.shape[1]:
            logits_processor = of_rows(logits_processor or (), criteria, token_streamer, batched)

        # another answer's processor calls: that step is not yet observed
        inside = turns_of(model)._is_owned()
        with turns_of(model):
            target = target_of(model, config.max_length, self.linear, self.context)
            execution = choose_execution(target, self.execution)
            drafter = self._drafter(model, target, eos) if not inside else self._made(target, eos)
            if self.start == "cold":
                if batched and drafter.stateful:
                    raise UserError(
                        "start=cold: forgets between answers what those of a batch share; use"
                        " start=hot"
                    )
                drafter.reset()
            if not batched:  # a batch opens a session for each row
                session = drafter.session()

        limit = min(target.context, self.context or target.context)
        max_new = config.max_length - input_ids.shape[1]
        tokens = [max(min(max_new, limit - len(row)), 1) for row in prompts]
        given = []
        for count in tokens:
            settings = row_settings(count, config, logits_processor or (), execution)
            given.append(dict(settings, eos=eos, ends=asked(criteria, input_ids.device)))

        def stream(step: StepRecord) -> None:
            if token_streamer is not None:
                for token in step.tokens:
                    token_streamer.put(torch.tensor([token]))

        if batched:
            requests = ((row, Request(**each)) for row, each in zip(prompts, given, strict=True))
            with closing(decode_batch(target, drafter, requests, len(prompts))) as steps_of_all:
                generations = exhaust(steps_of_all)
        else:
            with closing(decode(target, session, prompts[0], **given[0])) as steps:
                generations = [exhaust(steps, stream)]

        answers = [out.tokens for out in generations]
        for out, count in zip(generations, tokens, strict=True):
            if out.stop == "length" and count < max_new:
                out.stop = "context"

        if any(out.stop == "context" for out in generations):
            logger.warning_once(
                f"{target.name}: the answer ends at the {limit} tokens that its context has"
            )

        # transformers' own: without a pad id, the first of the EOS ids
        filler = config._pad_token_tensor
        padding = 0 if filler is None else int(filler)
        new = pad_sequence([*map(torch.tensor, answers)], True, padding)  # (B, n)
        ids = torch.cat((input_ids, new.to(input_ids.device)), 1)
        if token_streamer is not None:
            token_streamer.end()
        return output(ids, generations) if config.return_dict_in_generate else ids

    def _made(self, target: Target, eos: frozenset[int]) -> Drafter:
        return make_method(self.method, target, eos=eos, **self.settings)

    def _drafter(self, model: Any, target: Target, eos: frozenset[int]) -> Drafter:
        """Return this method's drafter for a model.

        For a new target or other EOS ids it is new, with the same state.
        """
        state: ModelState = vars(model)[ATTRIBUTE]
        *made_for, drafter = state.drafters.get(self, (None, None, None))
        if drafter is None or made_for != [target, eos]:
            new = self._made(target, eos)
            if drafter is not None and new.stateful:
                new.load_state_dict(drafter.state_dict())
            state.drafters[self] = (target, eos, new)
            drafter = new
        return drafter


def row_settings(
    tokens: int, config: Any, processors: Iterable[Any], how: Execution
) -> dict[str, Any]:
    """Return the `Request` settings of a row of at most `tokens` new tokens.

    When sampling, a row has a seed of its own.
    """
    if config.do_sample:
        sampling = drawn_by(processors, seed=int(torch.randint(1 << 62, (1,))))
    else:
        sampling = Sampling(processors=tuple(processors))
    return dict(max_new_tokens=tokens, sampling=sampling, execution=how.under(sampling))


def unpadded(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Return the rows of ids (B, P) without the padding on their left."""
    rows: list[list[int]] = input_ids.tolist()
    padding = [0] * len(rows) if mask is None else (mask == 0).sum(-1).tolist()
    return [row[count:] for row, count in zip(rows, padding, strict=True)]


def of_rows(
    processors: Iterable[Any], criteria: Iterable[Any], streamer: Any, batched: bool
) -> list[Any]:
    """Return copies of the processors of padded rows for rows without padding.

    Then the penalty has no padding to leave out.

    Raises UserError that names processors, criteria or a batch's streamer that read more than each
    row's own ids.
    """
    streamed = batched and streamer is not None
    bare = [copy.copy(processor) for processor in processors]
    for processor in bare:
        if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
            processor.prompt_ignore_length = None

    names = [type(other).__name__ for other in (*bare, *criteria)]
    names = [name for name in names if name not in READ_IDS] + ["token_streamer"] * streamed
    for processor in bare:
        if getattr(processor, "prompt_ignore_length", None) is not None:
            names.append("prompt_ignore_length")

    if names:
        rows = "a batch" if batched else "a padded row"
        raise UserError(
            f"custom_generate: {rows} has no {', '.join(names)}; leave it out, or give rows one"
            " by one"
        )

    return bare


def output(ids: torch.Tensor, generations: list[Generation]) -> Any:
    """Return ids (B, n) in transformers' output class.

    Its `generations` are the rows' answers and their steps.
    """
    from transformers.generation import GenerateDecoderOnlyOutput

    found: Any = GenerateDecoderOnlyOutput(sequences=ids)
    found.generations = generations  # no field, which would be one of the output's tuple, too
    return found


def undecided(criteria: Iterable[Any], max_length: int, eos: Collection[int]) -> Any:
    """Return a StoppingCriteriaList of what the loop does not decide.

    Each criterion costs a GPU transfer per token.
    """
    from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

    def decided(criterion: Any) -> bool:
        if type(criterion) is EosTokenCriteria:
            return set(criterion.eos_token_id.tolist()) <= set(eos)
        return type(criterion) is MaxLengthCriteria and criterion.max_length >= max_length

    return StoppingCriteriaList(criterion for criterion in criteria if not decided(criterion))


def asked(criteria: Iterable[Any], device: torch.device) -> Callable[[list[int]], bool] | None:
    """Return a function, as `Request.ends`, that is True if a criterion ends a text.

    None without criteria.
    """
    from transformers.generation import StoppingCriteriaList

    listed = StoppingCriteriaList(criteria)
    if not listed:
        return None
    return lambda text: bool(listed(torch.tensor([text], device=device), None).all())


def eos_ids(ids: Any) -> frozenset[int]:
    """Return the ids of an `eos_token_id`, which may be one, several or none.

    Raises UserError for anything else.
    """
    listed = ids.tolist() if hasattr(ids, "tolist") else ids  # a tensor
    if listed is None:
        listed = []
    several = listed if isinstance(listed, Iterable) else [listed]
    found = [getattr(token, "tolist", lambda token=token: token)() for token in several]
    if not all(isinstance(token, int) for token in found):
        raise UserError(f"eos={ids}: must be a token id, or several")
    return frozenset(found)


def target_of(
    model: Any, length: int, linear: str = "torch", max_context: int | None = None
) -> Target:
    """Return the model's target for texts of `length` tokens.

    The length is cut to `max_context` and the model's positions.

    The target is kept with the model. It is made anew if the text is longer than its context, or
    the model has changed (`Target.changed`) or is a copy. Callers hold the model's turns. Raises
    UserError as `Target` and `choose_linear`.
    """
    state: ModelState = vars(model).get(ATTRIBUTE, ModelState())
    if any(target.model is not model or target.changed for target in state.targets.values()):
        state = ModelState()

    limits = [limit for limit in (max_context, position_limit(model)) if limit is not None]
    limit = min(limits, default=None)
    length = length if limit is None else min(length, limit)
    target = state.targets.get(linear)
    if target is not None and target.context >= length:
        return target

    # a power of two: targets are rarely made anew
    context = max(DEFAULT_CONTEXT, 1 << (length - 1).bit_length())
    context = context if limit is None else min(context, limit)
    chosen = choose_linear(unwrapped(model), linear)
    # unfusing would move weights that graphs address
    if linear == "auto" and chosen.copy == "fused":
        chosen = Layouts(("torch",))

    target = ModelTarget(model, context=context, linear=chosen)
    state.targets[linear] = target
    if chosen.copy == "torch":
        state.without_copies[linear] = target

    # not by Module.__setattr__, which looks for parameters in it
    object.__setattr__(model, ATTRIBUTE, state)
    return target
