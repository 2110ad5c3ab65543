"""Place a model on devices or processes; measure peak memory, busy cores and the phases of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from model.engine import Target
from model.errors import UserError

from .processes import check_ranks, world_size
from .settings import ModelSettings


def choose_device(name: str) -> torch.device:
    """Return the device; `auto` is CUDA if there is one, else the CPU. `locks.exclusive` chooses among GPUs."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # which is refused below, as every other type
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
        from transformers.distributed import DistributedConfig  # slow to import, needed only here

        return {"distributed_config": DistributedConfig(tp_size=world_size(), tp_plan="auto")}
    return {} if settings.device_map is None else {"device_map": settings.device_map}


def place_model(model: Any, settings: ModelSettings, device: torch.device) -> Any:
    """Move the model to its device, or check its placement on several.

    Raises:
        UserError: a device map that leaves weights in main memory or on the disk, heads that do not divide.
    """
    if settings.tensor_parallel:
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if heads % world_size():
            raise UserError(f"{settings.name}: {world_size()} processes cannot share its {heads} key-value heads")
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

    CUDA: allocated by tensors, summed over devices, less `other_bytes`. CPU: the resident set of the process, on Linux.
    """
    if all(device.type == "cuda" for device in devices):
        return sum(int(torch.cuda.max_memory_allocated(device)) for device in devices) - other_bytes
    if all(device.type == "cpu" for device in devices):
        return _resident_peak()
    return None


def _cuda(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]


def _resident_peak() -> int | None:
    """Return the peak resident set of this process; None where the system is not Linux."""
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return None


class PhaseClock:
    """Add up seconds by phase of a step; synchronises the device at each mark, so that work counts in its phase."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.seconds: dict[str, float] = defaultdict(float)
        self.restart()

    def restart(self) -> None:
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        self.target.synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
