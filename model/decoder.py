"""A model, its tokenizer and a method: text in, text out."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils import logging

from .engine import (
    GREEDY,
    Drafter,
    Generation,
    Request,
    Sampling,
    StepRecord,
    Target,
    decode,
    exhaust,
)
from .engine.attention.checks import unwrapped
from .engine.loop.answer import acceptance_record
from .engine.loop.batch import decode_batch
from .engine.rule.sampling import hashed_seed
from .errors import UserError, one_line
from .files import load_state, local_path, save_state
from .generation_config import ends_by, eos_ids, not_applied, with_own_settings
from .methods import DEFAULT, make_method
from .pretrained import choose_device, load_pretrained
from .prompts import CHAT, RAW, chat_ids, chat_text, default_template, one_row, several, text_ids
from .settings import option_like
from .tuning import choose_execution, described
from .weights.linear import unpack_linears
from .weights.linear_choice import choose_linear

logger = logging.get_logger(__name__)
# An unsettled end: an unfinished character, or text that clean_up_tokenization_spaces may still
# join ("do n" + "'t")
UNSETTLED = re.compile(r"(?:\ufffd|[ ']+(?:n'?|[vr])?)$")
DTYPES = ("auto", "float32", "float16", "bfloat16")
# Text; a chat; or ids: a list or an array (NumPy, torch) of one row, or a mapping with input_ids.
Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor | NDArray[np.integer[Any]]
Prompt = str | Sequence[Mapping[str, str]] | Ids | Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    text: str
    ids: list[int]  # new tokens, EOS included if it came
    accept_lengths: list[int]  # tokens that each step added; they sum to the number of ids
    stop: str  # eos, length, context, or stop: a stop string, or the model's own max_time
    # seconds spent on preparing new step shapes, mostly in a GPU's first answers
    setup_s: float = 0.0
    # speculative_decoding: as `acceptance_record` returns it
    metrics: dict[str, Any] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)

    @property
    def mat(self) -> float:
        """New tokens per forward, the bonus token included."""
        return len(self.ids) / len(self.accept_lengths)


class Decoder:
    """Decodes with a method, whose state is kept between prompts.

    Threads may share a decoder; a lock is held for each step.

    Args:
        model: a causal LM of transformers, also inside the wrapper of peft or torch.compile; or a
            `Target`.
        tokenizer: None: ids in, ids out.
        method: a name of `methods.METHODS`, or a drafter; settings are the method's own.
        start: hot: keep what is learnt; cold: forget it before each prompt; or a saved state's
            file.
        eos: ids that end an answer; default: those of the model's configs and the tokenizer.
        context: tokens of prompt and answer together; default: the model's limit, at most 4096.
        execution: auto, eager or graph.
        linear: auto, half, onednn, fused or torch: the layout of linear layers until `release`.

    Raises UserError for a model, method or setting that does not fit.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        method: str | Drafter = DEFAULT,
        start: str | Path = "hot",
        eos: int | Iterable[int] | None = None,
        context: int | None = None,
        execution: str = "auto",
        linear: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise UserError(f"chat_template_kwargs={chat_template_kwargs}: must be a mapping")

        self.tokenizer = tokenizer
        self.start = str(start)
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self._stop_strings: tuple[str, ...] = ()
        self._stop_criteria: list[Any] = []
        if not isinstance(model, Target):
            model = unwrapped(model)
            model = Target(model, context=context, linear=choose_linear(model, linear))
        self.target = model
        self.execution = choose_execution(self.target, execution)
        self.eos = eos_of(self.target.model, tokenizer) if eos is None else eos_ids(eos)
        self.method = self._drafter_of(method, settings)
        if self.start not in ("hot", "cold"):
            self.load_state(self.start)

    def _drafter_of(self, method: str | Drafter, settings: dict[str, Any]) -> Drafter:
        if isinstance(method, str):
            return make_method(method, self.target, eos=self.eos, **settings)
        if not isinstance(method, Drafter):
            raise UserError(f"method={method}: must be a name or a drafter")
        if settings:
            name = type(method).__name__
            raise UserError(f"method {name}: is made already and takes no {', '.join(settings)}")
        return method

    @property
    def settings(self) -> dict[str, str]:
        max_draft = self.method.max_nodes - 1
        nodes = str(max_draft) if self.method.sizing is None else f"auto, at most {max_draft}"
        settings = {"method": type(self.method).__name__, "nodes": nodes}
        settings |= described(self.target, self.execution)
        if left_out := not_applied(self.target.model.generation_config, self.tokenizer):
            settings["not applied of the model's generation_config"] = left_out
        return settings

    def reset(self) -> None:
        with self.target.turns:
            self.method.reset()

    def release(self) -> None:
        """Restore the model's linear layers and free the caches; the decoder's last call."""
        with self.target.turns:
            unpack_linears(self.target.model)
            self.target.release()
            if self.target.lean is not None:
                self.target.lean.clear()

    def save_state(self, path: str | Path) -> None:
        with self.target.turns:
            save_state(self.method.state_dict(), local_path(path))

    def load_state(self, path: str | Path) -> None:
        """Load what `save_state` wrote. Raises UserError if unreadable or another method's."""
        state = load_state(local_path(path))
        with self.target.turns:
            self.method.load_state_dict(state)

    def __reduce__(self) -> Any:
        raise UserError(
            "Decoder: cannot be copied or pickled; copy the model (after `release`) and make a new"
            " one, to which `save_state` and `load_state` bring what was learnt"
        )

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        quantize: str | None = None,
        **settings: Any,
    ) -> Decoder:
        """Load a model from the hub or a folder. Raises UserError if it cannot be loaded.

        Args:
            dtype: auto: on a CPU float32, with 16-bit weights kept; elsewhere the checkpoint's own.
            device: default: CUDA if available, else the CPU.
            quantize: int8 or int4, by torchao.
        """
        if str(dtype).removeprefix("torch.") not in DTYPES:
            raise UserError(f"dtype={dtype}: use one of {', '.join(DTYPES)}")

        model, tokenizer = load_pretrained(
            name_or_path,
            dtype=dtype,
            device=choose_device(device or "auto"),
            linear=settings.get("linear", "auto"),
            quantize=quantize,
            revision=revision,
            common=dict(trust_remote_code=trust_remote_code),
        )
        return cls(model, tokenizer, **settings)

    @property
    def template(self) -> str:
        """The chat template: chat (the tokenizer's own), vicuna_v1.1 (of Vicuna) or raw (none)."""
        return default_template(self.tokenizer, self.target.name)

    def ids_of(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt: ids, text, or a chat (roles and contents) by `template`."""
        row = prompt if isinstance(prompt, str) else one_row(prompt)
        if isinstance(row, str):
            row = text_ids(self._tokenizer_for("text"), row)
        elif any(isinstance(turn, Mapping) for turn in row):
            row = self._chat_ids(row)

        for token in row:
            if not isinstance(token, int) or isinstance(token, bool):
                raise UserError(
                    f"prompt: holds {str(token)[:40]!r}, which is no token id; give text, ids or"
                    " one chat"
                )

        if not row:
            raise UserError("prompt: has no tokens")
        return row

    def _tokenizer_for(self, kind: str) -> Any:
        if self.tokenizer is None:
            raise UserError(f"prompt: is {kind}, and this decoder has no tokenizer; give token ids")
        return self.tokenizer

    def _chat_ids(self, chat: list[Any]) -> list[int]:
        tokenizer = self._tokenizer_for("a chat")
        if self.template == RAW:
            raise UserError(
                "prompt: is a chat, and the tokenizer has no template for one; give text"
            )

        try:
            if self.template == CHAT:
                return chat_ids(tokenizer, chat, **self.chat_template_kwargs)
            return text_ids(tokenizer, chat_text(self.template, chat))
        except Exception as error:  # the template's own errors, and jinja2's
            raise UserError(
                f"prompt: the chat template refuses it ({one_line(error)[:200]})"
            ) from None

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] | None = None,
        **unknown: Any,
    ) -> Generator[StepRecord, None, Generation]:
        """Yield the answer's steps, each as soon as its tokens are known; return the whole answer.

        Raises UserError as `ids_of`, or if the model was changed.

        Args:
            stop: texts that end an answer; default: those of the model's generation_config.
        """
        refuse_unknown(unknown)
        ids = self.ids_of(prompt)
        return self.decode(ids, self.request(ids, max_new_tokens, sampling, stop))

    def decode(
        self, ids: list[int], request: dict[str, Any]
    ) -> Generator[StepRecord, None, Generation]:
        with self.target.turns:
            if self.start == "cold":
                self.reset()
            session = self.method.session()
        return decode(self.target, session, ids, **request)

    def decode_batch(
        self, prompts: Iterable[tuple[list[int], dict[str, Any]]], batch: int
    ) -> Generator[tuple[int, Generation], None, list[Generation]]:
        if self.start == "cold" and self.method.stateful:
            raise UserError(
                "start=cold: forgets between answers what those of a batch share; use hot, or"
                " answer one by one"
            )
        requests = ((ids, Request(**settings)) for ids, settings in prompts)
        return decode_batch(self.target, self.method, requests, batch)

    def request(
        self,
        ids: list[int],
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Return a `Request`'s arguments with the model's own. Raises UserError as `stream`."""
        model = self.target.model
        left_out = not_applied(model.generation_config, self.tokenizer)
        if replace(seeded(sampling, 0), seed=0) == GREEDY and left_out:
            logger.warning_once(
                f"{self.target.name}: answers are greedy, without the model's own {left_out}"
            )

        with self.target.turns:
            if self.target.changed:
                raise UserError(
                    f"{self.target.name}: was resized, moved, cast or otherwise changed after this"
                    " decoder was made; make a new one"
                )
            self.target.token_budget(ids, max_new_tokens)
            sampling, criteria = with_own_settings(
                sampling, self.target, ids, max_new_tokens, self.eos
            )
            if stop is None and self.tokenizer is not None:
                stop = model.generation_config.stop_strings
            criteria += self._criteria_of(stop)

        return dict(
            max_new_tokens=max_new_tokens,
            eos=self.eos,
            sampling=sampling,
            execution=self.execution.under(sampling),
            reuse=self.start != "cold",
            ends=ends_by(criteria, self.target.device),
        )

    def _criteria_of(self, stop: str | Sequence[str] | None) -> list[Any]:
        if not isinstance(stop, Iterable | None):
            raise UserError(f"stop={stop}: must be a text, or several")

        strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if not strings:
            return []
        if self.tokenizer is None:
            raise UserError("stop: needs a tokenizer, and this decoder has none")
        if strings != self._stop_strings:  # making a criterion scans the whole vocabulary
            from transformers import StopStringCriteria

            try:
                self._stop_criteria = [StopStringCriteria(self.tokenizer, list(strings))]
            except (ValueError, TypeError, AttributeError) as error:
                raise UserError(f"stop={list(strings)}: {one_line(error)[:200]}") from None
            self._stop_strings = strings

        return self._stop_criteria

    def generate(self, prompt: Prompt, **settings: Any) -> Answer:
        """Return the whole answer; settings and errors are those of `stream`."""
        ids = self.ids_of(prompt)
        return self._answer(ids, exhaust(self.stream(ids, **settings)))

    def _answer(self, prompt: list[int], out: Generation) -> Answer:
        drafted = [step.nodes - 1 for step in out.steps]
        accepted = [len(step.rank_path) for step in out.steps]
        record = acceptance_record(drafted, accepted, self.method.max_nodes - 1)
        return Answer(
            self.text_of(out.tokens),
            out.tokens,
            out.accept_lengths,
            out.stop,
            out.setup_s,
            {"speculative_decoding": record},
            prompt,
        )

    def answers(
        self,
        prompts: Iterable[Prompt],
        *,
        batch: int = 1,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] | None = None,
        **unknown: Any,
    ) -> Iterator[Answer]:
        """Yield the answers to several prompts in order; settings as in `stream`.

        The noise of an answer is keyed by `sampling.seed` and its index. Raises UserError before
        the first answer if a prompt does not fit.

        Args:
            batch: prompts decoded together, in one forward per step.
        """
        refuse_unknown(unknown)
        rows = []
        for number, prompt in enumerate(several(prompts), 1):
            try:
                rows.append(self.ids_of(prompt))
                self.target.token_budget(rows[-1], max_new_tokens)
            except UserError as error:
                raise UserError(f"prompt {number}: {error}") from None

        requests = (
            (ids, self.request(ids, max_new_tokens, seeded(sampling, i), stop))
            for i, ids in enumerate(rows)
        )
        if batch == 1:
            for ids, request in requests:
                yield self._answer(ids, exhaust(self.decode(ids, request)))
            return

        ended = dict[int, Generation]()  # answers that wait for earlier ones
        count = 0  # answers yielded so far
        with closing(self.decode_batch(requests, batch)) as steps:
            for number, out in steps:
                if out.stop:
                    ended[number] = out
                while count in ended:
                    yield self._answer(rows[count], ended.pop(count))
                    count += 1

    def generate_all(
        self, prompts: Iterable[Prompt], *, progress: bool = True, **settings: Any
    ) -> list[Answer]:
        from tqdm.auto import tqdm  # transformers requires it

        listed = several(prompts)
        answers = self.answers(listed, **settings)
        return list(tqdm(answers, "", len(listed), unit="prompt", disable=not progress))

    @property
    def probes(self) -> list[int]:
        if not hasattr(self.tokenizer, "get_vocab"):
            return []
        byte = self.tokenizer.get_vocab().get("<0xFF>")
        return [] if byte is None else [byte]

    def text_of(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def refuse_unknown(settings: Iterable[str]) -> None:
    for key in settings:
        hint = option_like(key) or "there is max_new_tokens, sampling, stop"
        raise UserError(f"{key}: no such setting; {hint}")


def seeded(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling of answer `number`; 0 has the given seed, others independent noise."""
    if not isinstance(sampling, Sampling):
        raise UserError(
            f"sampling={sampling}: must be a Sampling, such as Sampling(temperature=0.7)"
        )
    return replace(sampling, seed=hashed_seed(sampling.seed, number)) if number else sampling


def pieces(
    steps: Iterable[StepRecord], text_of: Callable[[list[int]], str], probes: Sequence[int] = ()
) -> Iterator[tuple[str, int]]:
    """Yield the text that each step adds, and the step's accepted length.

    A character that later tokens may change comes with a later step: a text is settled only if
    appending one of the `probes` does not change it.
    """
    ids: list[int] = []  # from the last piece on: earlier ids do not change the text that follows
    # the yielded part of their text; its number of ids; tokens not yet yielded
    shown = ""
    last = 0
    length = 0
    for step in steps:
        ids += step.tokens
        length += step.accepted
        text = text_of(ids)
        if not UNSETTLED.search(text) and all(
            text_of([*ids, probe]).startswith(text) for probe in probes
        ):
            yield text[len(shown) :], length
            shown = text
            length = 0
            alone = text_of(ids[last:])
            if alone and text.endswith(alone):
                ids = ids[last:]
                shown = alone
            last = len(ids)

    if length:
        yield text_of(ids)[len(shown) :], length


def eos_of(model: Any, tokenizer: Any) -> frozenset[int]:
    sources = (model.generation_config, model.config, tokenizer)
    return frozenset().union(
        *(eos_ids(getattr(source, "eos_token_id", None)) for source in sources)
    )
