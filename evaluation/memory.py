"""Peak memory of an answer: what the devices' allocator held, or the process's resident set on the CPU."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def restart_peak(devices: Sequence[torch.device]) -> None:
    """Forget the peak so far. Where Linux does not let a process do so for its resident set, it stays."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    if all(device.type == "cpu" for device in devices):
        with suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")  # 5: reset the peak resident set (proc(5))


def peak_bytes(devices: Sequence[torch.device]) -> int | None:
    """Bytes at the peak since `restart_peak`, weights and cache included.

    CUDA: allocated by tensors, the sum over devices. CPU: the resident set of the whole process. Others: not known.
    """
    if all(device.type == "cuda" for device in devices):
        return sum(int(torch.cuda.max_memory_allocated(device)) for device in devices)
    if all(device.type == "cpu" for device in devices):
        return _resident_peak()
    return None


def _resident_peak() -> int:
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    scale = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
