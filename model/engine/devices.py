"""Differences between devices, and what steps on them share: graphs, locks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..errors import UserError

_capturing = threading.RLock()  # the stream is the process's, and what else ran on it would be captured, too
CUDA_12 = "https://download.pytorch.org/whl/cu126"  # wheels for drivers from 525 on
WARM_UPS = 2  # runs before a capture: what plans or allocates does so outside the graph


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what this thread asked for: of a GPU its current stream.

    To wait for all of a GPU would break off a capture of another thread.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def default_device(key: str = "device") -> torch.device:
    """CUDA if there is one, else the CPU.

    Raises UserError if there is an NVIDIA GPU that torch cannot use: a large model would decode on the CPU for days.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.cuda._device_count_nvml() > 0:  # 0 if CUDA_VISIBLE_DEVICES hides them, negative without a driver
        built = f"is made for CUDA {torch.version.cuda}" if torch.version.cuda else "is made without CUDA"
        raise UserError(
            f"{key}=auto: torch {torch.__version__} {built} and cannot use this machine's NVIDIA GPU; update its "
            "driver (CUDA 13 needs 580 or later), or install torch for CUDA 12: pip install --force-reinstall torch "
            f"--index-url {CUDA_12}; or decode on the CPU: {key}=cpu"
        )
    return torch.device("cpu")


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a GPU is the current one: where streams and graphs go."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def as_array(tensor: torch.Tensor) -> Any:
    """Return the same memory as a NumPy array, whose small look-ups take a tenth of torch's time; None off the CPU."""
    return tensor.numpy() if tensor.device.type == "cpu" else None


def fastest(tensor: torch.Tensor) -> Any:
    """Return the same memory as a NumPy array on the CPU, the tensor itself elsewhere."""
    array = as_array(tensor)
    return tensor if array is None else array


def on_host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of its shape and type in memory of the host that a GPU reads and writes without a detour."""
    return torch.zeros_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that can be allocated: what the device has free, and what torch holds and no tensor uses."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def give_back(device: torch.device) -> None:
    """Give memory that torch holds and no tensor uses back to the device."""
    if device.type == "cuda":
        with current(device):
            torch.cuda.empty_cache()


class Graphs:
    """The graphs of one target, which share their memory: a step is read before the next one is replayed.

    PyTorch frees the pool with its last graph, and opening it once more is an error or, worse, memory that is still in
    use: a dummy graph keeps it alive. In one pool for all targets two threads would write over each other's steps, and
    a model that is gone would not leave its memory to the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: tuple[Any, ...] = ()  # the pool, the dummy graph and its tensor

    def capture(self, run: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
        """Run `warm_up` some times, then capture `run`, which does not run it. Returns what replays it."""
        with _capturing, current(self.device):
            stream, now = _stream(self.device), torch.cuda.current_stream()
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    warm_up()
            now.wait_stream(stream)
            _clear_workspaces()  # the graph allocates its own, in the pool,
            try:
                replay: Callable[[], None] = self._graph(run, stream).replay
            finally:
                _clear_workspaces()  # and nothing else uses it
            return replay

    def _graph(self, run: Callable[[], None], stream: Any) -> Any:
        """Capture. Other threads may go on with what a capture of their own would not allow."""
        if not self._pool:
            pool, dummy = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(dummy, pool=pool, stream=stream, capture_error_mode="thread_local"):
                tensor = torch.zeros(1, device=self.device)
            self._pool = pool, dummy, tensor
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool[0], stream=stream, capture_error_mode="thread_local"):
            run()
        return graph


@cache
def _stream(device: torch.device) -> Any:
    """A device's stream for warm-ups and captures alike: cuBLAS keeps 32 MiB for each stream that it has met."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _clear_workspaces() -> None:
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # builds without CUDA have none


class _CudnnAttention:
    """cuDNN's attention is off inside `with`, in any thread: it plans anew for every shape, and each step has another.

    It is on again after the last of them, if it was before the first.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._was_on = threading.RLock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_on = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._was_on)


_cudnn_off = _CudnnAttention()


def without_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Inside, attention on a GPU is not cuDNN's; elsewhere nothing changes."""
    return _cudnn_off if device.type == "cuda" else nullcontext()


class Turns:
    """A fair re-entrant lock of one model, held for a step: a waiting thread goes before the last holder.

    A plain lock would be acquired again by its last holder before a waiting thread has woken up. Here the next thread
    holds `_queue` until the lock is free. Both are re-entrant, as the garbage collector may close an abandoned answer
    at any point of this code.
    """

    def __init__(self) -> None:
        self._queue, self._lock = threading.RLock(), threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            self._lock.acquire()
            return
        with self._queue:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @property
    def held(self) -> bool:
        """True if this thread is in a step."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # as above


_turns: WeakKeyDictionary[torch.nn.Module, Turns] = WeakKeyDictionary()
_making = threading.RLock()


def turns_of(model: Any) -> Turns:
    """Return the turns of a transformers model: one object for all its targets and shallow copies.

    They are kept by the module that these have in common, the one whose hidden states are read.
    """
    with _making:
        return _turns.setdefault(model.get_decoder(), Turns())
