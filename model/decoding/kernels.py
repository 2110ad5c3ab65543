"""Whether this project's Triton kernels are used on a device: where they run, and are right on it.

A kernel that was only ever interpreted or compiled may be wrong on a new device or compiler, and what it gets wrong
would be wrong text. So each has a trial against what it stands for, once a device, and without it steps go on by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from .devices import triton_problem

Trial = Callable[[torch.device], str]  # what was wrong, or ""
_trials: dict[str, Trial] = {}


def on(device: torch.device) -> AbstractContextManager[None]:
    """Where kernels are launched inside: Triton takes the current device, whatever its arguments say."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def tried(name: str) -> Callable[[Trial], Trial]:
    """A decorator: this is the trial of the kernels of that name."""

    def keep(trial: Trial) -> Trial:
        _trials[name] = trial
        return trial

    return keep


@cache
def problem(name: str, device: torch.device) -> str:
    """Why these kernels are not used on a device, or ""; tried when first asked.

    Any error counts: compilers and drivers raise what they like, and torch needs none of them.
    """
    why = triton_problem(device)
    if why:
        return why
    try:
        return _trials[name](device)
    except Exception as error:
        told = str(error).strip().splitlines()
        return f"{type(error).__name__}: {told[0] if told else ''}"[:200]


def problems(device: torch.device) -> dict[str, str]:
    """The kernels that are not used on a CUDA device, and why."""
    if device.type != "cuda":
        return {}
    return {name: why for name in _trials if (why := problem(name, device))}
