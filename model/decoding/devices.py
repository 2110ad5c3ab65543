"""What differs between kinds of devices."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a GPU is the current one: where kernels of our own, streams and captured graphs go."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def as_array(tensor: torch.Tensor) -> Any:
    """The same memory for NumPy, whose small look-ups take a tenth of torch's time; None off the CPU."""
    return tensor.numpy() if tensor.device.type == "cpu" else None


def fastest(tensor: torch.Tensor) -> Any:
    """The same memory for NumPy on the CPU, the tensor itself elsewhere."""
    array = as_array(tensor)
    return tensor if array is None else array


def triton_problem(device: torch.device) -> str:
    """Why this project's Triton kernels do not run on a device, or ""; Triton is not imported for it."""
    if device.type != "cuda":
        return "not a CUDA device"
    if torch.version.hip is not None:  # its devices name capabilities, too
        return "ROCm, on which it was never compiled"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "compute capability below 8.0"
    return "" if triton_installed() else "triton is not installed"


def on_host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of its shape and type in memory of the host that a GPU reads and writes without a detour."""
    return torch.zeros_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def wait(device: torch.device) -> None:
    """Wait for what a GPU was last asked for on its current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def without_cudnn_attention(device: torch.device) -> None:
    """Switch cuDNN's attention off for the process: it plans anew for every shape, and each eager step has another."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def give_back(device: torch.device) -> None:
    """Give memory that torch holds and no tensor uses back to the device."""
    if device.type == "cuda":
        with current(device):
            torch.cuda.empty_cache()


def triton_installed() -> bool:
    """Whether triton could be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None
