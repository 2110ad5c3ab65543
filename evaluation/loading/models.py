"""Load a model: the embedded one, a local folder, or a hub name."""

from __future__ import annotations

import gc
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    StaticCache,
)
from transformers.utils import logging as transformers_logging

from model import tuning
from model.decoder import eos_of
from model.devices import give_back
from model.engine import Target
from model.engine.attention.checks import check_context
from model.errors import UserError
from model.files import located, missing_weights, unusable
from model.generation_config import changed
from model.hub import SAFETENSORS, is_name, snapshot
from model.pretrained import choose_device, load_pretrained, loading
from model.prompts import CHAT, RAW, VICUNA
from model.weights.linear import is_narrow
from model.weights.linear_choice import Linear, choose_linear

from ..records.provenance import describe_device, model_files
from ..records.rows import read_object
from ..records.runs import INSIDE
from . import gguf
from .bench import TODAY, choose_template

CPU = torch.device("cpu")
# ids in a generation config that are the tokenizer's
SPECIAL_IDS = (
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
)
TOKENIZER_FILES = {"tokenizer.json", "tokenizer.model", "vocab.json"}
# of LLaMA models
SHAPES = {
    "vicuna-7b": (4096, 32, 32, 32, 11008, 32000),
    "vicuna-13b": (5120, 40, 40, 40, 13824, 32000),
    "vicuna-33b": (6656, 60, 52, 52, 17920, 32000),
    "llama-3-8b": (4096, 32, 32, 8, 14336, 128256),
    "small": (512, 4, 8, 8, 1376, 8192),
    "tiny": (64, 2, 4, 4, 128, 256),
}
SHAPE_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True)
class ModelSettings:
    """Settings that decide which model is loaded and how; equal ones share a loaded model."""

    name: str
    path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    device_map: (
        Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Any] | None
    ) = None
    template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context: int | None = None
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    linear: Linear = "auto"
    weights: Literal["float16", "float32"] | None = None
    quantize: Literal["int8", "int4"] | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.device_map is not None and self.device != "auto":
            raise UserError(
                f"model.device={self.device} and model.device_map={self.device_map}: give one of"
                " the two"
            )
        if self.device_map is not None and self.quantize is not None:
            raise UserError(
                f"model.quantize={self.quantize}: is for a model on one device;"
                " leave out device_map"
            )

    @property
    def kernel(self) -> str | None:
        """The attention to load with; None: transformers' choice."""
        return None if self.attention == "auto" else self.attention

    @property
    def weight_files(self) -> tuple[str, ...]:
        return (*SAFETENSORS, "pytorch_model.bin") if self.allow_pickle else SAFETENSORS


@dataclass(frozen=True)
class WithoutWeights:
    """In place of a `Target`: what requests to a server need of a model."""

    model: Any  # its config and generation_config
    context: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device = CPU
    devices: tuple[torch.device, ...] = (CPU,)
    linear: str = "torch"

    token_budget = Target.token_budget

    def check_execution(self, name: str) -> str:
        return name


@dataclass(frozen=True)
class LoadedModel:
    settings: ModelSettings
    target: Target
    tokenizer: Any
    template: str
    eos: frozenset[int]
    # the checkpoint's generation settings, unused in plain greedy decoding
    left_out: dict[str, Any] = field(default_factory=dict)
    # of a GGUF file: name, hash and tensor types
    converted_from: dict[str, Any] = field(default_factory=dict)
    # digests of the folder's files, or the hub's commit
    files: dict[str, str] = field(default_factory=dict)
    # transformers' own, of `stock`, by sequences and tokens; see `stock_generate`
    static_caches: dict[tuple[int, int], StaticCache] = field(default_factory=dict)

    @property
    def reads_date(self) -> bool:
        """True if its chat template holds today's date, and is not one of chat_template_kwargs."""
        template = str(getattr(self.tokenizer, "chat_template", ""))
        is_own = "chat_template" not in (self.settings.chat_template_kwargs or {})
        return self.template == CHAT and is_own and TODAY.search(template) is not None

    @cached_property
    def stock(self) -> Any:
        """The model as transformers loads it, which `hf` measures.

        If the engine's own has 16-bit weights, it is another one, in float32. Raises UserError if
        the free memory does not hold it.
        """
        model = self.target.model
        if not is_narrow(model):
            return model
        needed = 4 * sum(parameter.numel() for parameter in model.parameters())
        free = psutil.virtual_memory().available
        if needed > free:
            raise UserError(
                f"hf: {self.settings.name} as transformers loads it takes {needed / 1e9:.1f} GB"
                f" more in float32, and {free / 1e9:.1f} GB are free; leave hf out"
            )

        wide = replace(self.settings, dtype="float32", revision=self.files.get("commit"))
        stock, _ = pretrained(wide, self.target.device, locate(wide))
        plain_greedy(stock)
        return stock

    def release(self) -> None:
        self.static_caches.clear()
        if isinstance(self.target, Target):
            self.target.release()


_loaded: LoadedModel | None = None


def load_model(settings: ModelSettings) -> LoadedModel:
    """Load a model, or return the previous one if its settings and files are unchanged.

    Raises UserError if something is missing or unknown, or the engine refuses the model.
    """
    global _loaded
    folder = locate(settings)
    files = _files(settings, folder)
    if _loaded is None or _loaded.settings != settings or _loaded.files != files:
        forget_model()  # free the old weights before loading new ones
        device = _prepare_device(settings)
        model, tokenizer = pretrained(settings, device, folder)
        check_offloaded(model, settings)
        _loaded = _complete(settings, model, tokenizer, _target(model, settings), folder)

    return _loaded


def load_without_weights(settings: ModelSettings) -> LoadedModel:
    folder = locate(settings, with_weights=False)
    trust = settings.trust_remote_code
    with loading(f"model {settings.path}:"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    generation_config = GenerationConfig()
    with suppress(OSError):  # it has none
        generation_config = GenerationConfig.from_pretrained(folder)

    model = SimpleNamespace(config=config, generation_config=generation_config)
    context = check_context(model, settings.name, settings.context)
    vocabulary = config.get_text_config().vocab_size
    dtype = choose_dtype(settings.dtype, CPU)
    target: Any = WithoutWeights(model, context, vocabulary, dtype)
    return _complete(settings, model, tokenizer, target, folder)


def forget_model() -> None:
    """Free the weights that `load_model` keeps, and their device memory."""
    global _loaded
    if _loaded is not None:
        device = _loaded.target.device
        _loaded = None
        gc.collect()  # target, hooks, drafter and steps form reference cycles
        give_back(device)


def random_model(shape: str, settings: ModelSettings) -> LoadedModel:
    """Build a model of one of SHAPES with random weights and no tokenizer, for step times."""
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}: unknown; use {', '.join(SHAPES)}")
    if settings.quantize is not None:
        raise UserError(f"model.quantize={settings.quantize}: is for checkpoints, not for --shape")
    device = _prepare_device(settings)
    sizes = dict(zip(SHAPE_FIELDS, SHAPES[shape], strict=True))
    config = LlamaConfig(max_position_embeddings=4096, **sizes)
    torch.manual_seed(0)

    with torch.device(device):
        dtype = choose_dtype(settings.dtype, device)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=settings.kernel
        ).eval()

    return LoadedModel(settings, _target(model, settings), None, VICUNA, frozenset())


def choose_dtype(name: str, device: torch.device) -> Any:
    """Return the type; `auto` is float16 on an accelerator, as in the paper, and else float32."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "float16"
    return getattr(torch, name)


def _prepare_device(settings: ModelSettings) -> torch.device:
    """Return the device; a GPU is made the current one, for streams, graphs and kernels."""
    device = choose_device(settings.device, "model.device")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def _target(model: Any, settings: ModelSettings) -> Target:
    return Target(model, context=settings.context, linear=choose_linear(model, settings.linear))


def _complete(
    settings: ModelSettings, model: Any, tokenizer: Any, target: Target, folder: Path
) -> LoadedModel:
    if settings.chat_template_kwargs:
        tokenizer.apply_chat_template = partial(
            tokenizer.apply_chat_template, **settings.chat_template_kwargs
        )

    eos = eos_of(model, tokenizer)
    left_out = plain_greedy(model)
    template = choose_template(settings.template, tokenizer, f"{settings.name} {settings.path}")

    if template == RAW != settings.template:
        raw = (
            "has no chat template; each question's text is its prompt"
            " (model.template=vicuna_v1.1: Vicuna's template)"
        )
        print(f"model {settings.path}: {raw}", file=sys.stderr)

    note = read_object(folder / gguf.NOTE)
    files = _files(settings, folder)
    return LoadedModel(settings, target, tokenizer, template, eos, left_out, note, files)


def pretrained(settings: ModelSettings, device: torch.device, folder: Path) -> tuple[Any, Any]:
    """Load a model and its tokenizer from the folder that `locate` returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, tokenizer = load_pretrained(
            settings.path if _is_on_hub(settings) else str(folder),
            dtype=settings.dtype if device.type == "cpu" else choose_dtype(settings.dtype, device),
            device=device,
            linear=settings.linear,
            quantize=settings.quantize,
            called=f"model {settings.path}",
            revision=folder.name,  # the commit, of a model on the hub
            weights=settings.weight_files,
            common=dict(trust_remote_code=settings.trust_remote_code),
            attn_implementation=settings.kernel,
            device_map=settings.device_map,
        )

    return model, tokenizer


def check_offloaded(model: Any, settings: ModelSettings) -> None:
    """Raise UserError if a device map has left weights in main memory or on disk."""
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        raise UserError(
            f"{settings.name}: does not fit on the devices of"
            f" model.device_map={settings.device_map}, and a step would wait for weights from main"
            " memory or disk; use more devices or a smaller model.dtype"
        )


def plain_greedy(model: Any) -> dict[str, Any]:
    """Remove a checkpoint's generation settings, except the special tokens' ids, and return them.

    Otherwise `generate` would apply them, and `hf` would not be the plain greedy decoding that
    every method here reproduces.
    """
    config = model.generation_config
    ids = {key: getattr(config, key) for key in SPECIAL_IDS}
    model.generation_config = GenerationConfig(**ids)

    no_settings = (*ids, "transformers_version")
    names = [key for key in vars(config) if key not in no_settings and key[0] != "_"]
    usual = GenerationConfig._get_default_generation_params()
    changes = changed(config, names)
    return {key: v for key, v in changes.items() if v is not False or usual.get(key)}


def _is_on_hub(settings: ModelSettings) -> bool:
    return not located(settings.path).exists()


def _files(settings: ModelSettings, folder: Path) -> dict[str, str]:
    if _is_on_hub(settings):
        return {"commit": folder.name}
    return model_files(folder, settings.weight_files)


def locate(settings: ModelSettings, with_weights: bool = True) -> Path:
    """Return a model's folder, complete; fetched, if its path is a name on the hub.

    Args:
        with_weights: False where the configuration and the tokenizer suffice.

    Raises UserError if there is no such folder or name, or something is missing in it.
    """
    transformers_logging.set_verbosity_error()  # for all that is loaded from here on
    transformers_logging.disable_progress_bar()
    path = settings.path
    folder = located(path)
    if settings.weights is not None and not gguf.is_gguf(folder):
        raise UserError(
            f"model.weights={settings.weights}: is for a GGUF file; other checkpoints keep the"
            " weights that they have: model.weights=null"
        )

    if not folder.exists():
        if not is_name(path):
            raise UserError(f"model {path}: no such folder, and not a hub name (owner/name) either")
        kinds = settings.weight_files if with_weights else ()
        return snapshot(path, f"model.path={path}", kinds, settings.revision)

    if gguf.is_gguf(folder):
        folder = gguf.convert(folder, settings.weights or "float32")
    if not folder.is_dir():
        raise UserError(
            f"model {path}: a file; name a GGUF file or the folder with config.json, weights and"
            " tokenizer"
        )
    if why := unusable(folder):
        raise UserError(f"model {path}: {why}")
    names = {file.name for file in folder.iterdir()}
    if "config.json" not in names:
        raise UserError(f"model {path}: the folder has no config.json")
    if not names & TOKENIZER_FILES:
        raise UserError(
            f"model {path}: the folder has no tokenizer (tokenizer.json or tokenizer.model)"
        )
    if with_weights:
        check_weights(settings, folder)
    return folder


def check_weights(settings: ModelSettings, folder: Path) -> None:
    missing = missing_weights(folder, settings.weight_files)
    if not missing:
        return
    pickled = any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors"))
    if pickled and not settings.allow_pickle:
        missing = (
            "the folder has pickled weights only (*.bin); convert them to safetensors, or say"
            " model.allow_pickle=true (torch reads them as weights only, no code is run)"
        )
    raise UserError(f"model {settings.path}: {missing}")


def devices_in_words(loaded: LoadedModel) -> str:
    one = describe_device(loaded.target.device)
    count = len(loaded.target.devices)
    return one if count == 1 else f"{count} x {one}"


def choose_execution(
    name: str, loaded: LoadedModel, timed: bool = True, reads_text: bool = False
) -> tuning.Execution:
    """Return the execution asked for, or the choice of `tuning.choose_execution` for auto.

    Args:
        timed: False if methods share eager forwards.
        reads_text: True if sampling depends on the text, which only eager steps provide.

    Raises UserError as `tuning.choose_execution`, and if timed=false shares no forwards.
    """
    if not timed and name not in ("auto", "eager"):
        raise UserError(
            f"execution={name}: with timed=false the methods share eager forwards;"
            " leave out one of the two"
        )
    if name == "auto" and (not timed or reads_text):
        return tuning.Execution("eager")
    if name == INSIDE["eager"]:
        steps = tuning.choose_execution(loaded.target)
        return tuning.Execution(INSIDE[steps.name], steps.why)
    return tuning.choose_execution(loaded.target, name)
