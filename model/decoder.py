"""A model, its tokenizer and a method: text in, text out, a run of accepted tokens at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from .engine import Drafter, Generation, StepRecord, Target, decode
from .engine.linear import linear_of, unpack_linears
from .engine.loop import whole
from .engine.sampling import GREEDY, Sampling
from .engine.target import unwrapped
from .errors import UserError
from .files import load_state, save_state
from .methods import DEFAULT, make_method
from .quantization import quantize as quantized
from .tuning import choose_execution, choose_linear, described

DTYPES = ("auto", "float32", "float16", "bfloat16")
# Text; a chat; or ids: a list or an array (NumPy's, torch's) of one row, or a mapping that has them as input_ids.
Ids = Sequence[int] | Sequence[Sequence[int]] | torch.Tensor | NDArray[np.integer[Any]]
Prompt = str | Sequence[Mapping[str, str]] | Ids | Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        ids: new tokens, EOS included if it came.
        accept_lengths: tokens that each step added; they sum to the number of ids.
        stop: eos, length or context.
    """

    text: str
    ids: list[int]
    accept_lengths: list[int]
    stop: str

    @property
    def mat(self) -> float:
        """Mean accepted tokens a step."""
        return len(self.ids) / len(self.accept_lengths)


class Decoder:
    """Decodes with a method; what the method carries from prompt to prompt stays with this object.

    Threads may share it, and the model: each answer is what it is alone. They take turns by steps, so that several
    answers at once are no faster than one after the other. Each has a cache of its own.

    Args:
        model: a transformers causal LM with full attention. What peft or torch.compile made of it is taken, too; steps
            call it as it is inside `torch.compile(model)`.
        tokenizer: its tokenizer; None: ids in, ids out.
        method: a name of `methods.METHODS`, or a drafter; settings are the method's own. Default: the fastest on real
            text; the published one is "recycling".
        start: hot: what is learnt is carried on; cold: forgotten before each prompt; or the file of a saved state.
        context: tokens of prompt and answer together; default: the model's limit, at most 4096.
        execution: auto, eager or graph; see `tuning.choose_execution`.
        linear: auto, onednn, fused or torch; see `tuning.choose_linear`. All but torch change the layout of the model's
            linear layers, not what they compute, until `release`; onednn keeps a second copy of their weights.

    Attributes:
        settings: what was chosen, and why, by name.

    Raises:
        UserError: a model, method or setting that does not fit; says which.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        method: str | Drafter = DEFAULT,
        start: str | Path = "hot",
        context: int | None = None,
        execution: str = "auto",
        linear: str = "auto",
        **settings: Any,
    ) -> None:
        self.tokenizer, self.start = tokenizer, str(start)
        before = linear_of(unwrapped(model))
        try:
            self._make(model, method, context, execution, linear, settings)
        except UserError:
            if before == "torch":  # a decoder that cannot be made leaves the model as it was
                unpack_linears(unwrapped(model))
            raise

    def _make(
        self,
        model: Any,
        method: str | Drafter,
        context: int | None,
        execution: str,
        linear: str,
        settings: dict[str, Any],
    ) -> None:
        self.target = Target(model, context=context, linear=choose_linear(unwrapped(model), linear))
        self.execution = choose_execution(self.target, execution)
        self.eos = eos_of(self.target.model, self.tokenizer)
        if isinstance(method, str):
            method = make_method(method, self.target, eos=self.eos, **settings)
        elif settings:
            raise UserError(f"method {type(method).__name__}: is made already and takes no {', '.join(settings)}")
        self.method = method
        if self.start not in ("hot", "cold"):
            self.load_state(self.start)

    @property
    def settings(self) -> dict[str, str]:
        """What decides the speed, by name: what was asked for, or what auto chose and why."""
        return {"method": type(self.method).__name__, **described(self.target, self.execution)}

    def release(self) -> None:
        """Give the model's linear layers their own layout back; this decoder is not to be used afterwards."""
        with self.target.turns:
            unpack_linears(self.target.model)

    def save_state(self, path: str | Path) -> None:
        """Write what the method has learnt to a file. Raises UserError if the disk refuses it."""
        with self.target.turns:
            save_state(self.method.state_dict(), Path(path))

    def load_state(self, path: str | Path) -> None:
        """Go on from what `save_state` wrote. Raises UserError if it cannot be read, or is another method's."""
        with self.target.turns:
            self.method.load_state_dict(load_state(Path(path)))

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
        """A model of the hub or of a folder, from safetensors alone.

        Args:
            dtype: auto: float32 on a CPU, the checkpoint's own elsewhere.
            device: default: CUDA where there is one, else the CPU.
            quantize: int8 or int4, by torchao; see `quantization`.
            settings: as the class takes them.

        Raises:
            UserError: it cannot be loaded.
        """
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
        from transformers import AutoModelForCausalLM, AutoTokenizer  # not above: it takes a second

        if str(dtype).removeprefix("torch.") not in DTYPES:
            raise UserError(f"dtype={dtype}: use one of {', '.join(DTYPES)}")
        folder = Path(name_or_path).expanduser()
        is_local = bool(str(name_or_path)) and folder.exists()
        if not is_local:
            try:
                validate_repo_id(str(name_or_path))
            except HFValidationError:
                raise UserError(f"model {name_or_path}: no such folder, and not a hub name either") from None
        try:
            placed = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            torch.zeros(1, device=placed)
        except (RuntimeError, AssertionError) as error:  # no such device, or a torch that was not built for it
            raise UserError(f"device={device}: {' '.join(str(error).split())[:200]}") from None
        kind = torch.float32 if dtype == "auto" and placed.type == "cpu" else dtype
        common = dict(revision=revision, trust_remote_code=trust_remote_code)
        source = str(folder if is_local else name_or_path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **common)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=kind, use_safetensors=True, **common)
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            what = "cannot be loaded" if is_local else "no such folder, and the hub's cannot be loaded"
            raise UserError(f"model {name_or_path}: {what} ({' '.join(str(error).split())[:300]})") from None
        if quantize is not None:
            quantized(model, quantize, placed)
        return cls(model.to(placed).eval(), tokenizer, **settings)

    def ids_of(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: ids as they are, a chat (roles and contents) by the tokenizer's template, or text.

        Raises:
            UserError: text without a tokenizer, a chat without a template, several rows, padding, or no ids.
        """
        given = prompt if isinstance(prompt, str) else one_row(prompt)
        if isinstance(given, str) or any(isinstance(turn, Mapping) for turn in given):
            kind = "text" if isinstance(given, str) else "a chat"
            if self.tokenizer is None:
                raise UserError(f"prompt: is {kind}, and this decoder has no tokenizer; give token ids")
            if isinstance(given, str):
                ids = list(self.tokenizer(given)["input_ids"])
            elif self.tokenizer.chat_template is None:
                raise UserError("prompt: is a chat, and the tokenizer has no template for one; give text")
            else:
                ids = self._templated(given)
        else:
            ids = given
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                raise UserError(f"prompt: holds {str(token)[:40]!r}, which is no token id; give text, ids or one chat")
        if not ids:
            raise UserError("prompt: has no tokens")
        if not 0 <= min(ids) <= max(ids) < self.target.vocab_size:
            raise UserError(f"prompt: has ids outside the vocabulary of {self.target.vocab_size}")
        return ids

    def _templated(self, chat: list[dict[str, str]]) -> list[int]:
        """A chat's ids; whatever a template objects to, it says in its own words."""
        try:
            return list(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        except Exception as error:  # jinja2's, which comes with transformers, if at all
            raise UserError(f"prompt: the chat template refuses it ({' '.join(str(error).split())[:200]})") from None

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
    ) -> Generator[StepRecord, None, Generation]:
        """The answer's steps, each as soon as its tokens are known; returns the whole.

        What the last answer left in the cache of this prompt's beginning, as in a conversation, is not computed again.

        Raises:
            UserError: as `ids_of` and `decode`, and where the model is not what it was when this decoder was made.
        """
        ids = self.ids_of(prompt)
        with self.target.turns:
            if self.target.changed:
                raise UserError(
                    f"{self.target.name}: was resized, moved, cast or otherwise changed after this decoder was made; "
                    "make a new one"
                )
            if self.start == "cold":
                self.method.reset()
            session = self.method.session()
        return decode(
            self.target,
            session,
            ids,
            max_new_tokens=max_new_tokens,
            eos=self.eos,
            sampling=sampling,
            execution=self.execution.under(sampling),
            reuse=self.start != "cold",
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
    ) -> Answer:
        """The whole answer. Raises as `stream` does."""
        out = whole(self.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling))
        return Answer(self.text_of(out.tokens), out.tokens, out.accept_lengths, out.stop)

    def generate_all(
        self,
        prompts: Iterable[Prompt],
        *,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        progress: bool = True,
    ) -> list[Answer]:
        """The answers to several prompts, one after the other, each drawn by noise of its own.

        Args:
            progress: a bar on standard error.

        Raises:
            UserError: as `stream`.
        """
        from tqdm.auto import tqdm  # transformers brings it

        answers = []
        for number, prompt in enumerate(tqdm(list(prompts), unit="prompt", disable=not progress)):
            own = replace(sampling, seed=sampling.seed + number)
            answers.append(self.generate(prompt, max_new_tokens=max_new_tokens, sampling=own))
        return answers

    def text_of(self, ids: list[int]) -> str:
        """Without special tokens; empty without a tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(ids, skip_special_tokens=True))


def one_row(prompt: Any) -> list[Any]:
    """What a prompt that is no text holds, as Python's own numbers: ids, or the turns of a chat.

    Raises:
        UserError: several rows, padding, or no list at all.
    """
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise UserError(f"prompt: is a mapping of {', '.join(map(str, prompt))[:80]}, without input_ids")
        mask = prompt.get("attention_mask")
        if mask is not None and 0 in (row := one_row(mask)):
            raise UserError(f"prompt: attention_mask leaves {row.count(0)} of {len(row)} tokens out; give ids unpadded")
        return one_row(prompt["input_ids"])
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(given, int):  # a tensor without a dimension
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise UserError(f"prompt: is of type {type(prompt).__name__}; give text, a chat or token ids")
    given = [each.tolist() if hasattr(each, "tolist") else each for each in given]
    rows = [each for each in given if isinstance(each, Sequence) and not isinstance(each, str)]
    if not rows:
        return given
    if len(given) > 1:
        raise UserError(f"prompt: has {len(given)} rows; a decoder answers one, give them one by one")
    return one_row(rows[0])


def pieces(steps: Iterator[StepRecord], text_of: Any) -> Iterator[tuple[str, int]]:
    """A stream as text: what each step adds to it, and its accepted length.

    A character that a step leaves unfinished comes with the step that finishes it.
    """
    ids: list[int] = []
    shown = ""
    held = 0
    for step in steps:
        ids += step.tokens
        held += step.accepted
        text = text_of(ids)
        if not text.endswith("\ufffd"):  # bytes of a character that is not whole yet
            yield text[len(shown) :], held
            shown, held = text, 0
    if held:
        yield text_of(ids)[len(shown) :], held


def eos_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that the generation config, the config or the tokenizer calls an end of sequence."""
    eos: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        eos |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(eos)
