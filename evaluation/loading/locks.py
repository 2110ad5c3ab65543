"""A timed run shares its device with no other run: whoever has weights there holds its lock, and the next one waits.

Runs without times share the CPU with each other and not with a timed one: whichever comes second waits for the first.

The locks are the system's own on files in the temporary folder: it lets go of them when the process ends, however it
ends. They are exclusive ones alone, as Windows and filelock have them. So each untimed run locks a file of its own (its
place), which it takes while it holds the CPU's lock for a moment. A timed run holds the CPU's lock and waits until no
place is taken: no new one is taken meanwhile, so it waits for those that are at work and for no others.
"""

from __future__ import annotations

import dataclasses
import itertools
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from filelock import lock_descriptor

from .devices import check_placement, choose_device
from .processes import local_rank, local_world_size, meet
from .settings import ModelSettings

T = TypeVar("T")
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
    are gone: to the end of the command, or until it goes on elsewhere.

    Args:
        timed: whether a clock decides something of the run. Others share the CPU; a GPU is for one in any case.

    Raises:
        UserError: the settings contradict each other.
    """
    global _met
    check_placement(settings)
    with keeping():
        settings, names = _chosen(settings)
        if not timed and names == {CPU}:
            names = {_untimed()}
        if not names <= _held.keys():
            _let_go()  # all of them, so that of two runs that move neither waits for what the other holds
            for name in sorted(names):
                if local_rank() == 0:
                    _take(name)
                else:
                    _held[name] = None
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


def _untimed() -> str:
    """What untimed runs hold of the CPU."""
    return f"{CPU}-untimed"


def _take(name: str) -> None:
    """Hold a device, or for an untimed run a place on the CPU, however long that takes."""
    if name != _untimed():
        _hold(name)
        if name == CPU:
            _until(_no_place_is_taken, f"untimed runs are at work on {name}; this timed one starts when they are done")
        return
    _hold(CPU)  # nobody is timed now, and nobody begins to be until the place is taken
    tries = (_try_lock(f"{name}-{index}") for index in itertools.count())
    _held[name] = next(place for place in tries if place is not None)
    if (whole := _held.pop(CPU)) is not None:
        whole.close()


def _hold(*names: str) -> str:
    """Hold whichever of these devices is free first, however long that takes; gives its name."""
    what = f"any of {len(names)} GPUs" if len(names) > 1 else names[0]

    def free() -> tuple[str, BinaryIO] | None:
        return next(((name, handle) for name in names if (handle := _try_lock(name)) is not None), None)

    name, handle = _until(free, f"another run is being timed on {what}; this one starts when it is done")
    _held[name] = handle
    return name


def _no_place_is_taken() -> bool | None:
    """True if no untimed run is at work on this CPU, else None."""
    for path in _file(_untimed()).parent.glob(f"{_file(_untimed()).stem}-*.lock"):
        with path.open("rb") as handle:
            if not lock_descriptor(handle.fileno(), blocking=False):
                return None
    return True


def _until(look: Callable[[], T | None], why: str) -> T:
    """Look again until there is something; say why, unless the second look finds it (a place is taken quickly)."""
    looks = 0
    while (found := look()) is None:
        looks += 1
        if looks == 2:
            print(f"waiting: {why}", file=sys.stderr)
        time.sleep(AGAIN)
    return found


def _file(name: str) -> Path:
    """The file that a lock is on."""
    return Path(tempfile.gettempdir()) / re.sub(r"[^\w.-]", "_", f"token-recycling-{platform.node()}-{name}.lock")


def _try_lock(name: str) -> BinaryIO | None:
    """Lock a device if nobody else does."""
    path = _file(name)
    with suppress(FileExistsError):  # made once, by whoever comes first; others may be other users: read-only is enough
        path.open("xb").close()
        path.chmod(0o644)
    handle = path.open("rb")
    if lock_descriptor(handle.fileno(), blocking=False):
        return handle
    handle.close()
    return None
