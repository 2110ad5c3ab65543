"""Decoding inside transformers' own `generate`: `custom_generate=Generate()`."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Collection, Iterable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from .decoder import Decoder
from .devices import turns_of
from .engine import Generation, Sampling, StepRecord, Target, exhaust
from .engine.attention.checks import CACHE_NAMES, DEFAULT_CONTEXT, position_limit, unwrapped
from .engine.rule.sampling import drawn_by
from .errors import UserError
from .generation_config import OUTPUT, ends_by, eos_ids, named, refused, undecided
from .methods import DEFAULT
from .weights.linear import Layouts, unpack_linears
from .weights.linear_choice import choose_linear

logger = logging.get_logger(__name__)
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
# Inputs of the model that `generate` prepares; some are checked below.
PREPARED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}
PREPARED |= {*CACHE_NAMES, *named(OUTPUT)}


def refuse(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> None:
    names = [*refused(config)]
    if config.return_dict_in_generate:
        names += [name for name in named(OUTPUT) if getattr(config, name, False)]

    mask = kwargs.get("attention_mask")
    seen = torch.ones_like(input_ids) if mask is None else mask.long()
    if seen.shape != input_ids.shape or (seen.diff() < 0).any() or (seen[:, -1] == 0).any():
        names.append("padding but on the left (attention_mask)")
    elif (positions := kwargs.get("position_ids")) is not None:
        moved = positions != seen.cumsum(-1).to(positions) - 1
        if (moved & (seen.to(moved.device) == 1)).any():  # models of pictures have (4, B, P)
            names.append("position_ids")

    for name, value in kwargs.items():
        if name in CACHE_NAMES and value is not None:
            if any(vars(layer).get("device") is not None for layer in value.layers):
                names.append(name)  # it holds a text
        elif name not in PREPARED and value is not None and value != {}:
            names.append(name)

    if _prepared_elsewhere(model):
        names.append("inputs prepared by another object (prompt tuning)")
    if _has_hooks_of_peft(model):
        names.append("arguments of peft's layers (adapter_names, aLoRA)")
    if names:
        raise UserError(f"custom_generate: not supported: {', '.join(names)}; leave it out")


def _prepared_elsewhere(model: Any) -> bool:
    prepare = vars(model).get("prepare_inputs_for_generation")
    adapter = getattr(prepare, "__self__", None)
    return bool(getattr(getattr(adapter, "active_peft_config", None), "is_prompt_learning", False))


def _has_hooks_of_peft(model: Any) -> bool:
    """True if peft gives the layers arguments, which do not fit a draft tree's rows."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]
    return any(str(getattr(f, "__module__", "")).startswith("peft.") for f in functions)


class ModelTarget(Target):
    """A target that does not keep its model alive."""

    @property
    def model(self) -> Any:
        return self._model()

    @model.setter
    def model(self, model: Any) -> None:
        self._model = weakref.ref(model)


class Generate:
    """A decoding method for `custom_generate`; what it learns of each model is kept between calls.

    Greedy output is the model's own. With `do_sample`, `torch.manual_seed` seeds noise keyed by
    position: torch's own distribution, but other draws. The output of `return_dict_in_generate` has
    the attribute `generations`: each row's `Generation`.

    transformers (5.24) passes no `tokenizer` to a callable: instead of `stop_strings` give
    `stopping_criteria=[StopStringCriteria(tokenizer, [...])]`.

    Args:
        method, start, execution, settings: as `Decoder` takes them; `start` is hot or cold.
        context: maximum tokens of prompt and answer together; default: the model's positions.
        linear: auto packs the weights on a CPU where memory allows, until `release`.

    Raises UserError when called, naming what is not supported.
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
        if "eos" in settings:
            raise UserError("eos: is the eos_token_id of `generate`; leave it out")

        self.linear = linear
        self.context = context
        self.settings = dict(method=method, start=start, execution=execution, **settings)
        self._decoders: WeakKeyDictionary[Any, Decoder] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[partial[Generate], tuple[()]]:
        """Return one with the same settings that has learnt nothing."""
        settings = dict(linear=self.linear, context=self.context, **self.settings)
        return partial(type(self), **settings), ()

    def release(self, model: Any) -> None:
        """Restore a model's linear layers, and forget what was learnt of it."""
        model = unwrapped(model)
        with turns_of(model):
            unpack_linears(model)
        self._decoders.pop(model, None)

    def decoder(self, model: Any, length: int, eos: frozenset[int]) -> Decoder:
        limits = [size for size in (self.context, position_limit(model)) if size is not None]
        old = self._decoders.get(model)
        if old is not None and old.target.changed:
            old = None
        if old is not None and old.eos == eos and old.target.context >= min([length, *limits]):
            return old

        # a power of two: targets are rarely made anew
        context = max(DEFAULT_CONTEXT, 1 << (length - 1).bit_length())
        layouts = choose_linear(model, self.linear)
        # unfusing would move weights that graphs address
        if self.linear == "auto" and layouts.copy == "fused":
            layouts = Layouts(("torch",))
        target = ModelTarget(model, context=min([context, *limits]), linear=layouts)
        new = Decoder(target, eos=eos, **self.settings)
        if old is not None and new.method.stateful:
            new.method.load_state_dict(old.method.state_dict())
        self._decoders[model] = new
        return new

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        token_streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return ids (B, P + new), or transformers' output class.

        Args:
            token_streamer: gets the new tokens; `streamer` of `generate` gets the prompt, too.
        """
        both = (token_streamer, streamer_of_call())
        streamers = {id(streamer): streamer for streamer in both if streamer is not None}.values()
        with ExitStack() as stack:
            for streamer in streamers:
                stack.callback(streamer.end)
            config = generation_config
            refuse(model, input_ids, config, kwargs)
            prompts = unpadded(input_ids, kwargs.get("attention_mask"))
            eos = eos_ids(config.eos_token_id)
            processors = tuple(logits_processor or ())
            criteria = undecided(stopping_criteria or (), config.max_length, eos)
            batched = len(prompts) > 1
            if batched or len(prompts[0]) < input_ids.shape[1]:
                processors = of_rows(processors, criteria, streamers, batched)

            with turns_of(model):
                decoder = self.decoder(model, config.max_length, eos)

            limit = min(decoder.target.context, self.context or decoder.target.context)
            max_new = config.max_length - input_ids.shape[1]
            requests = []
            for row in prompts:
                sampling = Sampling(processors=processors)
                if config.do_sample:  # each row has a seed of its own
                    sampling = drawn_by(processors, seed=int(torch.randint(1 << 62, (1,))))
                request = dict(
                    max_new_tokens=max(min(max_new, limit - len(row)), 1),
                    eos=eos,
                    sampling=sampling,
                    execution=decoder.execution.under(sampling),
                    ends=ends_by(criteria, input_ids.device),
                )
                requests.append((row, request))

            def stream(step: StepRecord) -> None:
                for token in step.tokens:
                    for streamer in streamers:
                        streamer.put(torch.tensor([token]))

            if batched:
                with closing(decoder.decode_batch(requests, len(requests))) as steps_of_all:
                    generations = exhaust(steps_of_all)
            else:
                with closing(decoder.decode(*requests[0])) as steps:
                    generations = [exhaust(steps, stream)]

            for out, (_, request) in zip(generations, requests, strict=True):
                if out.stop == "length" and request["max_new_tokens"] < max_new:
                    out.stop = "context"
                    logger.warning_once(
                        f"{decoder.target.name}: the answer ends at the {limit} tokens that its"
                        " context has"
                    )

        # transformers' own: without a pad id, the first of the EOS ids
        filler = config._pad_token_tensor
        answers = [torch.tensor(out.tokens) for out in generations]
        new = pad_sequence(answers, True, 0 if filler is None else int(filler))  # (B, n)
        ids = torch.cat((input_ids, new.to(input_ids.device)), 1)
        return output(ids, generations) if config.return_dict_in_generate else ids


def unpadded(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    rows: list[list[int]] = input_ids.tolist()
    if mask is None:
        return rows
    padding = (mask == 0).sum(-1).tolist()
    return [row[count:] for row, count in zip(rows, padding, strict=True)]


def streamer_of_call() -> Any:
    """Return the `streamer` of the running call of `generate`; None without one.

    transformers (5.24) gives it the prompt and passes it to no callable.
    """
    from transformers import GenerationMixin

    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["streamer"]


def of_rows(
    processors: Iterable[Any], criteria: Iterable[Any], streamers: Collection[Any], batched: bool
) -> tuple[Any, ...]:
    """Return copies of padded rows' processors for rows without padding.

    Raises UserError that names those that read more than each row's own ids.
    """
    bare = tuple(copy.copy(processor) for processor in processors)
    names = [type(other).__name__ for other in (*bare, *criteria)]
    others = [name for name in names if name not in READ_IDS]
    if batched and streamers:
        others.append("streamer")
    for processor in bare:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):  # the padding
            processor.prompt_ignore_length = None
        elif ignored is not None:
            others.append("prompt_ignore_length")

    if others:
        rows = "a batch" if batched else "a padded row"
        raise UserError(
            f"custom_generate: {rows} has no {', '.join(others)}; leave it out, or give rows one"
            " by one"
        )

    return bare


def output(ids: Tensor, generations: list[Generation]) -> Any:
    from transformers.generation import GenerateDecoderOnlyOutput

    result: Any = GenerateDecoderOnlyOutput(sequences=ids)
    result.generations = generations  # no field, which would be one of the output's tuple, too
    return result
