"""Choose and lock the devices of a model; measure peak memory and the time of a step's parts.

A timed run shares its device with no other timed run, and a GPU is never shared. The locks are
files in the system's temporary folder, and end with the process.
"""

from __future__ import annotations

import dataclasses
import platform
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from model.engine import Target
from model.pretrained import choose_device

from .models import ModelSettings, forget_model

CPU = "cpu"  # name of the CPU's lock
POLL_SECONDS = 0.05

_locks: dict[str, FileLock] = {}  # this process's locks, by a device's name
_depth = 0


@contextmanager
def keep_devices() -> Iterator[None]:
    """Keep devices locked until the outermost of these nested blocks ends."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _release()


@contextmanager
def exclusive(settings: ModelSettings, timed: bool = True) -> Iterator[ModelSettings]:
    """Lock the devices that these settings use on this host, and yield them with the device chosen.

    The lock is taken before the model is loaded, as loading would disturb another run's timings. A
    run that is not timed does not lock the CPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = {_lock_name(torch.device("cuda", index)): index for index in range(count)}

    with keep_devices():
        if gpus and settings.device_map is not None:
            names = set(gpus)
        elif gpus and settings.device == "auto":
            # the one that this process holds already, else the first free one
            name = next((name for name in gpus if name in _locks), "")
            if not name:
                _release()
                name = _lock_one_of(*gpus)
            settings = dataclasses.replace(settings, device=f"cuda:{gpus[name]}")
            names = {name}
        else:
            names = {_lock_name(choose_device(settings.device, "model.device"))}

        if not timed:
            names.discard(CPU)
        if not names <= _locks.keys():
            _release()  # all of them, or two runs that swap devices would wait for each other
            for name in sorted(names):
                _lock_one_of(name)

        yield settings


def _release() -> None:
    if any(name.startswith("cuda") for name in _locks):  # weights on the CPU may stay
        forget_model()
    for lock in _locks.values():
        lock.release()
    _locks.clear()


def _lock_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    index = device.index or 0
    # CUDA_VISIBLE_DEVICES renumbers devices, so an index is not the same in all processes
    return f"cuda-{getattr(torch.cuda.get_device_properties(index), 'uuid', index)}"


def _lock_one_of(*names: str) -> str:
    devices = f"any of {len(names)} GPUs" if len(names) > 1 else names[0]
    waiting = False
    while True:
        for name in names:
            with suppress(Timeout):
                _locks[name] = _locked(name)
                return name
        if not waiting:
            print(
                f"waiting: another run is being timed on {devices}; this one starts when it is"
                " done",
                file=sys.stderr,
            )
            waiting = True
        time.sleep(POLL_SECONDS)


def _locked(name: str) -> FileLock:
    file = re.sub(r"[^\w.-]", "_", f"token-recycling-{platform.node()}-{name}.lock")
    # any user may open the file, which holds nothing
    lock = FileLock(Path(tempfile.gettempdir()) / file, mode=0o666, thread_local=False)
    lock.acquire(blocking=False)
    return lock


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def restart_peak(devices: Sequence[torch.device]) -> None:
    """Reset the peak memory; on a CPU, the process's peak resident set, where Linux permits it."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    if all(device.type == "cpu" for device in devices):
        with suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")  # 5: reset the peak resident set (proc(5))


def peak_bytes(devices: Sequence[torch.device]) -> int | None:
    """Return the peak bytes since `restart_peak`, weights and cache included; None where unknown.

    CUDA: allocated by tensors, over all devices. CPU: the resident set of the process, on Linux.
    """
    if all(device.type == "cuda" for device in devices):
        return sum(int(torch.cuda.max_memory_allocated(device)) for device in devices)
    if all(device.type == "cpu" for device in devices):
        with suppress(OSError):
            status = _STATUS.read_text(encoding="ascii", errors="replace")
            match = re.search(r"^VmHWM:\s*(\d+)", status, re.M)
            return 1024 * int(match[1]) if match else None

    return None


class PhaseClock:
    """Add up seconds by phase of a step; the device is synchronised at each mark."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        self.target.synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
