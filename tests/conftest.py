"""Toy models and small helpers. One thread: toy sizes gain nothing from more, and a busy machine stalls on them."""

import copy
import gc
import os
import tempfile
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from model.engine import Target
from tests.hub_server import Hub

torch.set_num_threads(1)

TIMES = {"torch": 3.0, "half": 1.0, "onednn": 2.0}  # of a product, by layout
SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)
NARROW = dict(intermediate_size=48, bos_token_id=1, eos_token_id=2, pad_token_id=0)
CONFIGS = {
    "llama": LlamaConfig(**SIZES, **NARROW),
    "llama-grouped": LlamaConfig(**SIZES, **NARROW, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SIZES, **NARROW, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, **NARROW, num_key_value_heads=2, head_dim=16),
    "mistral": MistralConfig(**SIZES, **NARROW, num_key_value_heads=2, sliding_window=256),
    "gemma": GemmaConfig(**SIZES, **NARROW, num_key_value_heads=1, head_dim=16),
    # eager alone
    "gemma2": Gemma2Config(
        **SIZES, **NARROW, num_key_value_heads=2, head_dim=16, sliding_window=256
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES, **NARROW, num_key_value_heads=2, head_dim=16, sliding_window=256
    ),
    "phi3": Phi3Config(**SIZES, **NARROW, num_key_value_heads=2),
    "smollm3": SmolLM3Config(**SIZES, **NARROW, num_key_value_heads=2),
    "olmo2": Olmo2Config(**SIZES, **NARROW, num_key_value_heads=2),
    "gpt-neox": GPTNeoXConfig(**SIZES, **NARROW),
    "gpt2": GPT2Config(
        vocab_size=61,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def toy_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of that architecture, sharpened so that its greedy text is neither constant nor noise."""
    torch.manual_seed(seed)
    # sdpa, where there is one; it writes into its config
    model = Auto.from_config(copy.deepcopy(CONFIGS[name])).eval()
    return sharpened(model).to(dtype)


@torch.no_grad()
def sharpened(model: PreTrainedModel, by: float = 6.0) -> PreTrainedModel:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(by)
    return model


def greedy(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, eos: list[int] | None = None
) -> list[int]:
    """transformers' own greedy generation: the new tokens."""
    return generated(model, prompt, max_new_tokens, eos)[0]


def generated(
    model: PreTrainedModel,
    prompt: list[int],
    max_new_tokens: int,
    eos: list[int] | None = None,
    **options: Any,
) -> tuple[list[int], int]:
    """transformers' greedy `generate` with these options: the new tokens, and the model's forwards."""
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    ids = torch.tensor([prompt])
    handle = model.register_forward_pre_hook(count)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos,
        **{"pad_token_id": 0} | options,
    )
    handle.remove()
    return out[0, len(prompt) :].tolist(), forwards


@pytest.fixture(scope="session", autouse=True)
def modules_are_no_garbage() -> None:
    """A run collects garbage before it loads a model: most of its time, if each time all libraries are searched."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def locks_of_our_own(tmp_path_factory) -> None:
    """Tests neither wait for the timed runs of this machine nor hold them up."""
    tempfile.tempdir = os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("locks"))


@pytest.fixture(scope="session", autouse=True)
def layouts_of_our_own(tmp_path_factory) -> Any:
    """Layouts have the same times on all machines, and are not kept for the user."""

    def measure(weights: Any, dtype: Any, possible: Any) -> Any:
        return {
            name: [seconds] * 4 for name, seconds in TIMES.items() if name in ("torch", *possible)
        }, True

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("times")))
        patched.setattr("model.weights.linear_choice.measure", measure)
        lean = {"own": [2.0, 2.3, 2.5, 2.8], "lean": [1.0, 1.23, 1.4, 1.7]}
        patched.setattr(
            "model.engine.target.lean_forward.LeanForward._measure", lambda *_: (lean, True)
        )
        yield


@pytest.fixture
def hub() -> Any:
    """A hub without repositories; `hub.stop()` takes it out of reach."""
    hub = Hub()
    hub.start()
    yield hub
    hub.stop()


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return toy_model("llama-grouped")


@pytest.fixture
def forwarded(monkeypatch) -> list[int]:
    """How many tokens each forward has, from now on."""
    counts: list[int] = []
    run = Target._run_model

    def counted(target, cache, tokens, *more, **kwargs):
        counts.append(len(tokens))
        return run(target, cache, tokens, *more, **kwargs)

    monkeypatch.setattr(Target, "_run_model", counted)
    return counts
