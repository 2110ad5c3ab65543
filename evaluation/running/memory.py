"""Memory: what a model needs before it is loaded; the peak of an answer, of a GPU's allocator or a CPU's process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from model.decoding import Target
from model.decoding.devices import free_bytes
from model.decoding.target import DEFAULT_CONTEXT
from model.errors import UserError

MARGIN = 500 * 10**6  # bytes for what a step computes, CUDA's own and captured graphs
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Holding:
    """What one of several methods on the same target holds on its CUDA devices: bytes, the shared cache left out."""

    target: Target
    bytes: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is allocated inside and stays is this method's: nobody else is at work meanwhile."""
        before = self._allocated()
        try:
            yield
        finally:
            self.bytes += self._allocated() - before

    def _allocated(self) -> int:
        devices = _cuda(self.target.devices)
        return sum(int(torch.cuda.memory_allocated(device)) for device in devices) - cache_bytes(self.target)


def cache_bytes(target: Target) -> int:
    """Bytes of the engine's cache on CUDA devices, which transformers' own generate has no use for."""
    return target.caches.nbytes if _cuda(target.devices) else 0


def restart_peak(devices: Sequence[torch.device]) -> None:
    """Forget the peak so far. Where Linux does not let a process do so for its resident set, it stays."""
    for device in _cuda(devices):
        torch.cuda.reset_peak_memory_stats(device)
    if all(device.type == "cpu" for device in devices):
        with suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")  # 5: reset the peak resident set (proc(5))


def peak_bytes(devices: Sequence[torch.device], not_its_own: int = 0) -> int | None:
    """Bytes at the peak since `restart_peak`, weights and cache included.

    CUDA: allocated by tensors, the sum over devices, less `not_its_own`. CPU: the resident set of the whole process.
    Others: not known.
    """
    if all(device.type == "cuda" for device in devices):
        return sum(int(torch.cuda.max_memory_allocated(device)) for device in devices) - not_its_own
    if all(device.type == "cpu" for device in devices):
        return _resident_peak()
    return None


def _cuda(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]


def _resident_peak() -> int:
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    scale = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check_room(name: str, config: Any, dtype: torch.dtype, device: torch.device, context: int | None) -> None:
    """Refuse what cannot fit on a GPU before its weights are read: these, and a cache for the context.

    Args:
        config: the model's, as transformers has it.
        context: tokens; None: as `Target` chooses.

    Raises:
        UserError: it does not fit; says which context would.
    """
    if device.type != "cuda" or getattr(config, "quantization_config", None):  # smaller than its shapes say
        return
    text = config.get_text_config()
    if not all(hasattr(text, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")):
        return  # of another kind: what its cache takes is not known before it is loaded
    limit = getattr(text, "max_position_embeddings", None)
    context = context or min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = sum(p.numel() * p.element_size() for p in shapes.parameters())
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width * dtype.itemsize  # bytes of keys and values
    free = free_bytes(device)
    if weights + token * context <= free:
        return
    fits = (free - weights - MARGIN) // token // 256 * 256
    advice = f"set model.context={fits} or less" if fits > 0 else "use model.quantize, model.device_map or a larger GPU"
    raise UserError(
        f"model {name}: weights of {weights / 1e9:.1f} GB and a cache of {token * context / 1e9:.1f} GB for {context} "
        f"tokens do not fit into the {free / 1e9:.1f} GB free on {device}; {advice}"
    )
