"""Whether this project's Triton kernels are used on a device: where they run, and are right there.

A kernel that was only ever interpreted or compiled may be wrong on a new device or compiler, and what it gets wrong
would be wrong text. So each is tried against what it stands for, once for each size in which it is used, as Triton
compiles anew for sizes that are 1 or a multiple of 16; where it is not right, or does not run, steps go on by torch.
"""

from __future__ import annotations

import importlib
import itertools
import random
import time
import warnings
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed

from .devices import triton_problem
from .tree import Tree

MOST_NODES = 512  # of a kernel that is one program
MOST_CELLS = 8192  # of such a one's block of nodes and candidates; beyond, registers are spilled
missed: dict[str, str] = {}  # kernels that a CUDA device did without, by name and size, and why; the caller's to clear
_setup = [0.0]


def block(n: int) -> int:
    """The power of two that holds n."""
    return 1 << (n - 1).bit_length()


def fits(nodes: int, k: int = 1) -> bool:
    """Whether one program takes so many nodes, with k candidates each."""
    return nodes <= MOST_NODES and block(nodes) * block(k) <= MOST_CELLS


def load(path: str, device: torch.device, *size: Hashable) -> Any:
    """A module of kernels, if they are to be used on this device at this size; else None.

    Args:
        path: `room.name_kernel` in this package, under whatever name it is installed; its `trial(device, *size)` says what was wrong, or "".
        size: what the trial is made with: the sizes that the kernels are then given.
    """
    if device.type != "cuda":
        return None
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    module, why = _loaded(path, device, *size)
    if why:
        missed[f"{path.rpartition('.')[2]} ({', '.join(map(str, size))})"] = why
    return module


def setup_s() -> float:
    """Seconds spent on loading kernels so far, trials and their compiling included: not decoding."""
    return _setup[0]


@cache
def _loaded(path: str, device: torch.device, *size: Hashable) -> tuple[Any, str]:
    """The module, or None and why."""
    start = time.perf_counter()
    why = _agreed(triton_problem(device) or _tried(path, device, *size))
    module = None if why else importlib.import_module(path)
    if why:
        warnings.warn(f"{path} is not used on {device}: {why}", stacklevel=2)
    _setup[0] += time.perf_counter() - start
    return module, why


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


def random_tree(nodes: int, levels: int, k: int, rng: random.Random) -> Tree:
    """For a trial: a tree of so many levels, and so many nodes if no more than k children a node can make them."""
    sizes = [1] * levels
    for _ in range(nodes - levels):
        room = [level for level in range(1, levels) if sizes[level] < k * sizes[level - 1]]
        if room:
            sizes[rng.choice(room)] += 1
    parents, first = [0], 0
    for above, size in itertools.pairwise(sizes):
        parents += sorted(first + place // k for place in rng.sample(range(above * k), size))
        first += above
    return Tree(parents)
