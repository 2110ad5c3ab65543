"""Device locks: a timed run shares its device with no other timed run, and a GPU is never shared.

Untimed runs on a CPU take no lock; the tables say which runs began while other processes kept cores busy. The locks are
the system's, on files in the temporary folder, and end with the process that holds the weights.
"""

from __future__ import annotations

import dataclasses
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from filelock import lock_descriptor

from .devices import check_placement, choose_device
from .settings import ModelSettings

CPU = "cpu"  # the name of its lock
POLL_SECONDS = 0.05

# Called before GPUs are released, to free the weights on them.
before_release: list[Callable[[], None]] = []
_locks: dict[str, BinaryIO] = {}  # by a device's name
_depth = 0


@contextmanager
def keep_devices() -> Iterator[None]:
    """Keep the devices locked inside until the outermost of these blocks ends: a command, or a single run."""
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
    """Lock the devices that these settings use on this host; yields the settings with the device chosen for auto.

    The lock is held from before the model is loaded, which would disturb another run's timings, until its weights are
    freed: at the end of the command, or when the process moves to another device.

    Args:
        timed: False if no clock matters to the run.

    Raises:
        UserError: the settings contradict each other.
    """
    check_placement(settings)
    with keep_devices():
        settings, names = _devices_of(settings)
        if not timed:
            names.discard(CPU)
        if not names <= _locks.keys():
            _release()  # all of them, or two runs that swap devices would wait for each other
            for name in sorted(names):
                _lock_one_of(name)
        yield settings


def _release() -> None:
    if any(name.startswith("cuda") for name in _locks):  # weights on the CPU may stay
        for forget in before_release:
            forget()
    for handle in _locks.values():
        handle.close()
    _locks.clear()


def _devices_of(settings: ModelSettings) -> tuple[ModelSettings, set[str]]:
    """Return the settings with their device, and the names of all devices used. For auto it locks a GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and settings.device_map is not None:
        return settings, {_identity(torch.device("cuda", index)) for index in range(count)}
    if count and settings.device == "auto":
        device = _first_free([torch.device("cuda", index) for index in range(count)])
        return dataclasses.replace(settings, device=str(device)), {_identity(device)}
    return settings, {_identity(choose_device(settings.device))}


def _first_free(devices: list[torch.device]) -> torch.device:
    """Return the GPU that this process holds already, else wait for the first free one."""
    names = {_identity(device): device for device in devices}
    if locked := [name for name in names if name in _locks]:
        return names[locked[0]]
    _release()
    return names[_lock_one_of(*names)]


def _identity(device: torch.device) -> str:
    """Return a name that does not depend on CUDA_VISIBLE_DEVICES, so that it is the same in all processes."""
    if device.type != "cuda":
        return device.type
    index = device.index or 0
    return f"cuda-{getattr(torch.cuda.get_device_properties(index), 'uuid', index)}"


def _lock_one_of(*names: str) -> str:
    """Wait for and lock the first of these devices that is free; returns its name."""
    devices = f"any of {len(names)} GPUs" if len(names) > 1 else names[0]
    waiting = False
    while True:
        for name in names:
            if (handle := _try_lock(name)) is not None:
                _locks[name] = handle
                return name
        if not waiting:
            print(f"waiting: another run is being timed on {devices}; this one starts when it is done", file=sys.stderr)
            waiting = True
        time.sleep(POLL_SECONDS)


def _file(name: str) -> Path:
    """Return the file of a lock."""
    return Path(tempfile.gettempdir()) / re.sub(r"[^\w.-]", "_", f"token-recycling-{platform.node()}-{name}.lock")


def _try_lock(name: str) -> BinaryIO | None:
    """Lock a device if it is free; None if not."""
    path = _file(name)
    with suppress(FileExistsError):  # made once, perhaps by another user: reading suffices
        path.open("xb").close()
        path.chmod(0o644)
    handle = path.open("rb")
    if lock_descriptor(handle.fileno(), blocking=False):
        return handle
    handle.close()
    return None
