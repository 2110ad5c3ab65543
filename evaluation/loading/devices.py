"""Place a model on devices; measure peak memory and the phases of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from model.engine import Target
from model.engine.devices import default_device
from model.errors import UserError

from .settings import ModelSettings


def choose_device(name: str) -> torch.device:
    """Return the device; `auto` is CUDA if there is one, else the CPU. `locks.exclusive` chooses among GPUs."""
    if name == "auto":
        return default_device("model.device")
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
    """Raise UserError if settings contradict each other."""
    device_map = settings.device_map
    if device_map is not None and settings.device != "auto":
        raise UserError(f"model.device={settings.device} and model.device_map={device_map}: give one of the two")
    if device_map is not None and settings.quantize is not None:
        raise UserError(f"model.quantize={settings.quantize}: is for a model on one device; leave out device_map")


def place_model(model: Any, settings: ModelSettings, device: torch.device) -> Any:
    """Move the model to its device. Raises UserError for a device map that leaves weights in main memory or on disk."""
    if settings.device_map is None:
        return model.to(device)
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        raise UserError(
            f"{settings.name}: does not fit on the devices of model.device_map={settings.device_map}, and a step would "
            "wait for weights from main memory or disk; use more devices or a smaller model.dtype"
        )
    return model


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def restart_peak(devices: Sequence[torch.device]) -> None:
    """Reset the peak. A process's resident set is reset only where Linux permits it."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    if all(device.type == "cpu" for device in devices):
        with suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")  # 5: reset the peak resident set (proc(5))


def peak_bytes(devices: Sequence[torch.device]) -> int | None:
    """Return the peak bytes since `restart_peak`, weights and cache included; None on other devices than these.

    CUDA: allocated by tensors, summed over devices. CPU: the resident set of the process, on Linux.
    """
    if all(device.type == "cuda" for device in devices):
        return sum(int(torch.cuda.max_memory_allocated(device)) for device in devices)
    if all(device.type == "cpu" for device in devices):
        return _resident_peak()
    return None


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
