"""Load a checkpoint: target models, draft models and GGUF files alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from .devices import default_device
from .errors import UserError, one_line
from .files import located, missing_weights, unusable
from .hub import SAFETENSORS, snapshot
from .weights import narrow_weights
from .weights.linear import halves
from .weights.quantization import torchao_config

KERNELS = ("sdpa", "eager")  # attention that takes a tree's mask


def choose_device(name: torch.device | str = "auto", key: str = "device") -> torch.device:
    """Return a device. Raises UserError if it cannot be used; `key` is its setting."""
    if name == "auto":
        return default_device(key)
    try:
        device = torch.device(name)
        if device.type == "cuda":  # creates no context there, as another process may be timing
            torch.cuda.get_device_properties(device)
        else:
            torch.zeros(1, device=device)
    # no such device, or a torch that was not built for it
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"{key}={name}: {one_line(error)[:200]}") from None
    return device


def load_pretrained(
    name: str,
    *,
    dtype: torch.dtype | str,
    device: torch.device,
    called: str = "",
    linear: str = "torch",
    quantize: str | None = None,
    with_tokenizer: bool = True,
    revision: str | None = None,
    weights: Sequence[str] = SAFETENSORS,
    common: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load a model in eval mode on its device, and its tokenizer of the same commit.

    Args:
        name: a folder, or a name on the hub.
        dtype: "auto": the checkpoint's own; on a CPU float32, from weights kept in 16 bits where
            possible, if `linear` is auto or half.
        called: the model's name in messages.
        weights: as `weight_files` takes them; empty for a GGUF file.
        common: of `from_pretrained` for model and tokenizer; `options` are the model's.
    """
    # not above: this import takes a second
    from transformers import AutoModelForCausalLM, AutoTokenizer

    called = called or f"model {name}"
    folder = located(name)
    is_local = bool(name) and folder.exists()
    if folder.is_file():
        raise UserError(f"{called}: a file; give the folder with config.json and weights")
    if not is_local:
        folder = snapshot(name, called, weights, revision)
    elif why := unusable(folder) or missing_weights(folder, weights):
        raise UserError(f"{called}: {why}")

    common = common or {}
    options = _own_kernel(folder, called, options)
    if weights == SAFETENSORS:
        options["use_safetensors"] = True

    def load(dtype: torch.dtype | str) -> Any:
        with loading(f"{called}:"):
            model, report = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, output_loading_info=True, **common, **options
            )
        if missing := sorted(report["missing_keys"]):  # transformers would draw them at random
            raise UserError(
                f"{called}: {len(missing)} of its weights are not in its files ({missing[0]})"
            )
        return model

    if quantize is not None:
        options["quantization_config"] = torchao_config(quantize, device)
        if device.type != "cpu":  # weights are quantised where they are used
            options["device_map"] = {"": device}

    tokenizer = None
    if with_tokenizer:
        with loading(f"{called}: its tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **common)

    wide = dtype == "auto" and device.type == "cpu"
    wants_halves = quantize is None and linear in ("auto", "half")
    if wide and wants_halves and halves():
        model = narrow_weights.load(load, folder, called)
    else:
        model = load(torch.float32 if wide else dtype)

    if not is_local:
        for part in filter(None, (model, model.config, tokenizer)):
            part.name_or_path = name
    return (model if options.get("device_map") else model.to(device)).eval(), tokenizer


@contextmanager
def loading(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of tokenizers, safetensors, or a checkpoint's own code
        raise UserError(f"{what} cannot be loaded ({one_line(error)[:300]})") from None


def _own_kernel(folder: Path, called: str, options: dict[str, Any]) -> dict[str, Any]:
    overruled: dict[str, Any] = {}
    with suppress(OSError, ValueError, AttributeError):  # transformers says why
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for key in ("_attn_implementation", "attn_implementation"):
            kernel = config.get(key)
            if kernel not in (None, *KERNELS):
                overruled[key] = options.get("attn_implementation")
                print(
                    f"{called}: its config.json asks for {kernel}, which takes no tree; loaded with"
                    " sdpa, or eager where the model has no sdpa",
                    file=sys.stderr,
                )
    return overruled | options
