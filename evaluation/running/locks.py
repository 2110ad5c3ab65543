"""No two timed runs share a device: whoever has weights on one holds its lock, and the next run waits or takes another.

The locks are the system's own on files in the temporary folder: it lets go of them when the process ends, however it
ends.
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
from .model_settings import ModelSettings
from .processes import local_rank, local_world_size, meet

CPU = "cpu"  # the name of its lock
AGAIN = 0.05  # seconds between two looks for a free device: short, so that who runs one after the other lets others in

# Called before GPUs are let go of: whoever keeps weights there drops them. Loading them is no business of this module.
before_letting_go: list[Callable[[], None]] = []
_held: dict[str, BinaryIO | None] = {}  # by a device's name; None where another rank of this host holds it for all
_inside, _met = 0, 0


@contextmanager
def keeping() -> Iterator[None]:
    """Devices taken inside stay this process's until the outermost of these blocks ends: a command, or a single run."""
    global _inside
    _inside += 1
    try:
        yield
    finally:
        _inside -= 1
        if not _inside:
            _let_go()


@contextmanager
def exclusive(settings: ModelSettings, timed: bool = True) -> Iterator[ModelSettings]:
    """Hold the devices that these settings use on this host; gives the settings with the device that auto found.

    From before the model is loaded, which would disturb another run's timings and take its memory, until its weights
    are gone: to the end of the command, or until it goes on elsewhere. Whoever takes no times waits for those who do,
    and then leaves the CPU to all; a GPU's memory is still for one.

    Raises:
        UserError: the settings contradict each other.
    """
    global _met
    check_placement(settings)
    with keeping():
        settings, names = _chosen(settings)
        if not names <= _held.keys():
            _let_go()  # all of them, so that of two runs that move neither waits for what the other holds
            for name in sorted(names):
                if local_rank() == 0:
                    _hold(name)
                else:
                    _held[name] = None
        if not timed and names == {CPU}:
            _let_go()
        _met += 1
        meet(f"devices/{_met}")
        yield settings


def _let_go() -> None:
    if any(name.startswith("cuda") for name in _held):  # on the CPU the weights are only memory
        for forget in before_letting_go:
            forget()
    for handle in _held.values():
        if handle is not None:
            handle.close()
    _held.clear()


def _chosen(settings: ModelSettings) -> tuple[ModelSettings, set[str]]:
    """The settings with their device, and the names of all devices that they use. `auto` may have locked one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and settings.tensor_parallel:
        return settings, {_identity(torch.device("cuda", index)) for index in range(local_world_size())}
    if count and settings.device_map is not None:
        return settings, {_identity(torch.device("cuda", index)) for index in range(count)}
    if count and settings.device == "auto":
        device = _first_free([torch.device("cuda", index) for index in range(count)])
        return dataclasses.replace(settings, device=str(device)), {_identity(device)}
    return settings, {_identity(choose_device(settings.device))}


def _first_free(devices: list[torch.device]) -> torch.device:
    """The GPU that this process holds already, else the first that nobody holds; waits until there is one."""
    names = {_identity(device): device for device in devices}
    if held := [name for name in names if name in _held]:
        return names[held[0]]
    _let_go()
    return names[_hold(*names)]


def _identity(device: torch.device) -> str:
    """A name that is the same for all processes, whatever CUDA_VISIBLE_DEVICES calls the device in each."""
    if device.type != "cuda":
        return device.type
    index = device.index or 0
    return f"cuda-{getattr(torch.cuda.get_device_properties(index), 'uuid', index)}"


def _hold(*names: str) -> str:
    """Hold whichever of these devices is free first, however long that takes; gives its name."""
    told = False
    while True:
        for name in names:
            if handle := _try_lock(name):
                _held[name] = handle
                return name
        if not told:
            _tell(f"any of {len(names)} GPUs" if len(names) > 1 else names[0])
            told = True
        time.sleep(AGAIN)


def _try_lock(name: str) -> BinaryIO | None:
    """Lock a device if nobody else does."""
    path = Path(tempfile.gettempdir()) / re.sub(r"[^\w.-]", "_", f"token-recycling-{platform.node()}-{name}.lock")
    with suppress(FileExistsError):  # made once, by whoever comes first; others may be other users: read-only is enough
        path.open("xb").close()
        path.chmod(0o644)
    handle = path.open("rb")
    if lock_descriptor(handle.fileno(), blocking=False):
        return handle
    handle.close()
    return None


def _tell(what: str) -> None:
    print(f"waiting: another run is being timed on {what}; this one starts when it is done", file=sys.stderr)
