"""transformers' own generate on the stock model."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, StaticCache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import ALL_CACHE_NAMES

from model.devices import synchronize, without_cudnn
from model.errors import UserError, one_line
from model.pretrained import load_pretrained
from model.weights.linear import stock_linears

from .models import LoadedModel

STATIC = "static cache"  # in names of tables
# the name of generate's cache: `cache`, and `past_key_values` in earlier versions
CACHE = ALL_CACHE_NAMES[0]


@dataclass(frozen=True)
class StockSettings:
    """Settings of transformers' own generate. Raises UserError for two ways of drafting."""

    compiled: bool = False
    lookup_tokens: int | None = None  # most tokens that its prompt look-up drafts
    draft_path: str | None = None  # a model that drafts, by its assisted generation

    def __post_init__(self) -> None:
        ways = {name: value for name, value in vars(self).items() if value}
        if len(ways) > 1:
            raise UserError(f"method: {' and '.join(ways)} exclude each other; set one")
        if self.lookup_tokens is not None and self.lookup_tokens < 1:
            raise UserError(f"method.lookup_tokens={self.lookup_tokens}: must be at least 1")

    @property
    def drafts(self) -> bool:
        return self.lookup_tokens is not None or self.draft_path is not None


def stock_drafts(loaded: LoadedModel, settings: StockSettings) -> dict[str, Any]:
    """Return what `assisted_generate` drafts with; nothing if generate is to decode plainly.

    Raises UserError for models that transformers does not draft for, or with.
    """
    if not settings.drafts:
        return {}
    if loaded.target.recurrent:
        name = loaded.settings.name
        raise UserError(f"{name}: has a recurrent state, for which transformers does not draft")
    if settings.draft_path is None:
        return {"prompt_lookup_num_tokens": settings.lookup_tokens}
    called = f"method.draft_path={settings.draft_path}"
    assistant, _ = load_pretrained(
        settings.draft_path,
        dtype=loaded.target.dtype,
        device=loaded.target.device,
        called=called,
        with_tokenizer=False,
        attn_implementation="sdpa",
    )
    sizes = [model.config.get_text_config().vocab_size for model in (assistant, loaded.stock)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{called}: has a vocabulary of {sizes[0]}, the target of {sizes[1]}; transformers"
            " drafts only with an equal one"
        )
    choices = assistant.generation_config
    if choices.num_assistant_tokens_schedule == "heuristic":  # which keeps lengths between prompts
        choices.num_assistant_tokens_schedule = "heuristic_transient"
    return {"assistant_model": assistant}


class StepTokens(BaseStreamer):
    """The tokens of each step, as generate streams them: first the prompt, then each forward's."""

    def __init__(self) -> None:
        self.prompt_and_steps: list[list[int]] = []

    def put(self, tokens: Tensor) -> None:
        self.prompt_and_steps.append(tokens.flatten().tolist())

    def end(self) -> None:
        pass


def stock_generate(
    loaded: LoadedModel,
    prompts: Sequence[list[int]],
    config: GenerationConfig,
    compiled: bool = False,
    seed: int = 0,
    **options: Any,
) -> tuple[list[list[int]], float]:
    """Continue prompts as one batch, padded on the left; return the new tokens, and the seconds.

    Args:
        compiled: give generate a static cache, with which transformers captures its steps as CUDA
            graphs. These read the whole cache, so there is one for each number of sequences and
            each power of two of tokens. All is generated again if something was compiled.
        options: further arguments of generate.

    Raises UserError if transformers fails with a static cache.
    """
    rows = [torch.tensor(prompt) for prompt in prompts]
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = padded(rows, padding_value=config.pad_token_id)
    seen = padded([torch.ones_like(row) for row in rows])
    size = len(prompts), 1 << (ids.shape[1] + config.max_new_tokens - 1).bit_length()
    model = loaded.stock
    caches = loaded.static_caches
    device = loaded.target.device
    options |= {"generation_config": config}

    with stock_linears(model), without_cudnn(device), warnings.catch_warnings(action="ignore"):
        while True:  # warnings are the compiler's, and of no use to users
            before = size in caches, counters["stats"]["unique_graphs"]
            torch.manual_seed(seed)
            synchronize(device)
            start = time.perf_counter()

            try:
                if compiled and size not in caches:
                    caches[size] = options[CACHE] = StaticCache(
                        config=model.config, max_cache_len=size[1]
                    )
                elif compiled:
                    options[CACHE] = caches[size]
                    options[CACHE].reset()  # its address stays, as captured steps are bound to it
                out = model.generate(ids.to(device), attention_mask=seen.to(device), **options)
            except Exception as error:  # compilers, kernels and models' code raise what they like
                if not compiled:
                    raise
                why = (
                    f"transformers fails on {loaded.settings.name} with its {STATIC}:"
                    f" {one_line(error)[:300]}"
                )
                raise UserError(f"method.compiled=true: {why}") from error

            answers = out[:, ids.shape[1] :].tolist(), time.perf_counter() - start
            if not compiled or before == (True, counters["stats"]["unique_graphs"]):
                return answers


def assisted_generate(
    loaded: LoadedModel, prompt: list[int], config: GenerationConfig, seed: int, **drafts: Any
) -> tuple[list[tuple[list[int], int]], float]:
    """Continue a prompt with transformers' own drafts.

    Return each step's new tokens and how many nodes its forward read (the root included), and the
    seconds.

    Args:
        drafts: `prompt_lookup_num_tokens` or `assistant_model` of generate.
    """
    streamed = StepTokens()
    reads: list[int] = []

    def count(_model: Any, _args: Any, inputs: dict[str, Any]) -> None:
        reads.append(inputs["input_ids"].shape[1])

    hook = loaded.stock.register_forward_pre_hook(count, with_kwargs=True)
    try:
        _, elapsed = stock_generate(
            loaded, [prompt], config, seed=seed, streamer=streamed, **drafts
        )
    finally:
        hook.remove()
    reads[0] -= len(prompt) - 1  # the first step's drafts are forwarded with the prompt
    return list(zip(streamed.prompt_and_steps[1:], reads, strict=True)), elapsed
