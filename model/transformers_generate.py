"""This project's decoding inside transformers' own `generate`: `model.generate(..., custom_generate=Generate())`.

transformers prepares inputs, processors and criteria as ever, and hands the decoding loop over.
"""

from __future__ import annotations

import weakref
from contextlib import closing
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .decoding import Drafter, Target, decode
from .decoding.devices import turns_of
from .decoding.linear import unpack_linears
from .decoding.sampling import Sampling
from .decoding.target import unwrapped
from .errors import UserError
from .generate_settings import refuse
from .methods import DEFAULT, make_method
from .tuning import make_fast

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
        self.targets: dict[tuple[str, str], Target] = {}  # by execution and linear
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
            target = target_of(model, config.max_length, self.execution, self.linear)
            drafter = self._drafter(model, target)
            if self.start == "cold":
                drafter.reset()
            session = drafter.session()
        processors = (logits_processor,) if logits_processor else ()
        temperature = 1.0 if config.do_sample else 0.0  # a temperature of the caller's is one of the processors
        seed = int(torch.randint(1 << 62, (1,))) if config.do_sample else 0
        steps = decode(
            target,
            session,
            prompt,
            max_new_tokens=config.max_length - len(prompt),
            eos=ended_by(config),
            sampling=Sampling(temperature=temperature, seed=seed, processors=processors),
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


def target_of(model: Any, length: int, execution: str = "auto", linear: str = "torch") -> Target:
    """Return the model's target for texts of so many tokens; made once and kept with the model.

    Made anew if the text is longer than its context, or the model has changed: copied, resized, moved, cast, with
    other layers or attention. Call it in a turn of the model's.

    Args:
        execution, linear: as `tuning.make_fast` takes them, where a target is made.

    Raises:
        UserError: more than the model's positions, or a model that the engine cannot drive.
    """
    state: ModelState = vars(model).get(ATTRIBUTE, ModelState())
    if any(target.model is not model or target.changed for target in state.targets.values()):
        state = ModelState()
    key = execution, linear
    if key in state.targets and state.targets[key].context >= length:
        return state.targets[key]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = -(-length // CONTEXT_STEP) * CONTEXT_STEP
    context = context if limit is None or length > limit else min(context, limit)
    state.targets[key] = make_fast(ModelTarget, model, context=context, execution=execution, linear=linear)
    object.__setattr__(model, ATTRIBUTE, state)  # not by Module.__setattr__, which looks for parameters in it
    return state.targets[key]
