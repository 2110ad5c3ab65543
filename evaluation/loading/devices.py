"""Place a model on devices or processes, check that it fits, measure peak memory and busy cores."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from model.engine import Target
from model.engine.devices import free_bytes
from model.engine.target import DEFAULT_CONTEXT
from model.errors import UserError

from .processes import check_heads, check_ranks, parallel_arguments
from .settings import ModelSettings


def choose_device(name: str) -> torch.device:
    """Return the device; `auto` is CUDA if there is one, else the CPU. `locks.exclusive` chooses among GPUs."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"model.device={name}: unknown device; use auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"model.device={name}: this machine has no CUDA device (or a torch build without CUDA)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"model.device={name}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"model.device={name}: this machine has no MPS device")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"model.device={name}: unknown device; use auto, cpu, cuda, cuda:N or mps")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def check_placement(settings: ModelSettings) -> None:
    """Raise UserError if settings contradict each other or the way this process was started."""
    given, parallel = settings.device_map, settings.tensor_parallel
    if given is not None and settings.device != "auto":
        raise UserError(f"model.device={settings.device} and model.device_map={given}: give one of the two")
    if parallel and (given is not None or settings.device != "auto"):
        raise UserError(
            "model.tensor_parallel=true places the model itself; leave out model.device and model.device_map"
        )
    if settings.quantize is not None and (given is not None or parallel):
        raise UserError(
            f"model.quantize={settings.quantize}: is for a model on one device; leave out device_map, tensor_parallel"
        )
    check_ranks(parallel)


def placement_arguments(settings: ModelSettings) -> dict[str, Any]:
    """Return arguments of `from_pretrained`: none for one device, to which the model is moved afterwards."""
    if settings.tensor_parallel:
        return parallel_arguments()
    return {} if settings.device_map is None else {"device_map": settings.device_map}


def place_model(model: Any, settings: ModelSettings, device: torch.device) -> Any:
    """Move the model to its device, or check its placement on several.

    Raises:
        UserError: a device map that leaves weights in main memory or on the disk, heads that do not divide.
    """
    if settings.tensor_parallel:
        check_heads(settings.name, model.config.get_text_config())
        return model
    if settings.device_map is None:
        return model.to(device)
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        raise UserError(
            f"{settings.name}: does not fit on the devices of model.device_map={settings.device_map}, and a step would "
            "wait for weights from main memory or disk; use more devices or a smaller model.dtype"
        )
    return model


WORK = ("user", "nice", "system", "irq", "softirq")  # without idle, waiting for a disk, stolen by a host


def cores_busy(seconds: float = 0.2) -> float | None:
    """Return how many cores other processes keep busy while this one sleeps; None if the system does not report it."""
    try:
        before = _busy_seconds()
        time.sleep(seconds)
        return (_busy_seconds() - before) / seconds
    except (OSError, ValueError, TypeError):
        return None


def _busy_seconds() -> float:
    """Return the seconds of work of all cores since boot."""
    times = psutil.cpu_times()
    return sum(getattr(times, kind, 0.0) for kind in WORK)


MARGIN = 500 * 10**6  # bytes for activations, CUDA's context and captured graphs
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class MemoryUse:
    """CUDA memory of one of several methods on a target, without the shared cache."""

    target: Target
    bytes: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add what is allocated inside the block and stays; nothing else may run meanwhile."""
        before = self._allocated()
        try:
            yield
        finally:
            self.bytes += self._allocated() - before

    def _allocated(self) -> int:
        devices = _cuda(self.target.devices)
        return sum(int(torch.cuda.memory_allocated(device)) for device in devices) - cache_bytes(self.target)


def cache_bytes(target: Target) -> int:
    """Return the bytes of the engine's cache on CUDA devices; transformers' own generate does not use it."""
    return target.caches.nbytes if _cuda(target.devices) else 0


def restart_peak(devices: Sequence[torch.device]) -> None:
    """Reset the peak. A process's resident set is reset only where Linux permits it."""
    for device in _cuda(devices):
        torch.cuda.reset_peak_memory_stats(device)
    if all(device.type == "cpu" for device in devices):
        with suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")  # 5: reset the peak resident set (proc(5))


def peak_bytes(devices: Sequence[torch.device], other_bytes: int = 0) -> int | None:
    """Return the peak bytes since `restart_peak`, weights and cache included; None on other devices than these.

    CUDA: allocated by tensors, summed over devices, less `other_bytes`. CPU: the resident set of the whole process.
    """
    if all(device.type == "cuda" for device in devices):
        return sum(int(torch.cuda.max_memory_allocated(device)) for device in devices) - other_bytes
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


def check_memory(name: str, config: Any, dtype: torch.dtype, device: torch.device, context: int | None) -> None:
    """Check before weights are read that they and a cache for the context fit on a GPU.

    Args:
        config: transformers' configuration of the model.
        context: tokens; None: as `Target` chooses.

    Raises:
        UserError: they do not fit; names a context that would.
    """
    if device.type != "cuda" or getattr(config, "quantization_config", None):  # quantised: smaller than its shapes
        return
    text = config.get_text_config()
    if not all(hasattr(text, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")):
        return  # another architecture: the size of its cache is unknown before loading
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
