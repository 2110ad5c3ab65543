"""Whether this project's Triton kernels are used on a device: where they run, and are right there.

A kernel that was only ever interpreted or compiled may be wrong on a new device or compiler, and what it gets wrong
would be wrong text. So each is tried against what it stands for, once for each size in which it is used; where it is
not right, or does not run, steps go on by torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed

from .devices import triton_problem

MOST_NODES = 512  # of a kernel that is one program
MOST_CELLS = 8192  # of such a one's block of nodes and candidates; beyond, registers are spilled
left_out: dict[str, str] = {}  # kernels that a CUDA device does without in this process, by name, and why


def block(n: int) -> int:
    """The power of two that holds n."""
    return 1 << (n - 1).bit_length()


def fits(nodes: int, k: int = 1) -> bool:
    """Whether one program takes so many nodes, with k candidates each."""
    return nodes <= MOST_NODES and block(nodes) * block(k) <= MOST_CELLS


def load(path: str, device: torch.device, *size: Hashable) -> Any:
    """A module of kernels, if they are to be used on this device at this size; else None.

    Args:
        path: `model.room.name_kernel`; its `trial(device, *size)` says what was wrong, or "".
        size: all that the kernels are compiled by.
    """
    if device.type != "cuda":
        return None
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _loaded(path, device, *size)


@cache
def _loaded(path: str, device: torch.device, *size: Hashable) -> Any:
    why = _agreed(triton_problem(device) or _tried(path, device, *size))
    if not why:
        return importlib.import_module(path)
    left_out[path.rpartition(".")[2]] = why
    return None


def _tried(path: str, device: torch.device, *size: Hashable) -> str:
    """What was wrong in a trial, or "". Any error counts: compilers and drivers raise what they like."""
    try:
        with on(device):
            wrong: str = importlib.import_module(path).trial(device, *size)
        return wrong
    except Exception as error:
        told = str(error).strip().splitlines()
        return f"{type(error).__name__}: {told[0] if told else ''}"[:200]


def _agreed(why: str) -> str:
    """The first rank's reason that there is: ranks of one model must not break ties in two ways.

    They come here in the same order, as all take the same steps.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return why
    reasons: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, why)
    return next(filter(None, reasons), "")


def on(device: torch.device) -> AbstractContextManager[None]:
    """Where kernels are launched inside: Triton takes the current device, whatever its arguments say."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
