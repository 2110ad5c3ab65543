"""What differs between devices; CUDA graphs and locks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import UserError

Run = Callable[[], None]
# captures share a stream, and other work on it would be captured, too
_capturing = threading.RLock()
CUDA_12 = "https://download.pytorch.org/whl/cu126"  # wheels for drivers from 525 on
WARM_UPS = 2  # runs before a capture, so that planning and allocation happen outside the graph


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        # waiting for the whole GPU would interrupt another thread's capture
        torch.cuda.current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def step_clock(devices: Iterable[torch.device]) -> Callable[[], float]:
    """Return the clock of steps: on a CPU this thread's own, which stops while others run."""
    elsewhere = any(device.type != "cpu" for device in devices)
    coarse = sys.platform == "win32"  # there a thread's clock moves by 16 ms at a time
    return time.perf_counter if elsewhere or coarse else time.thread_time


def default_device(key: str = "device") -> torch.device:
    """Return CUDA if available, else the CPU; raise UserError if torch cannot use an NVIDIA GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    # 0 if CUDA_VISIBLE_DEVICES hides them, negative without a driver
    if torch.cuda._device_count_nvml() > 0:
        built = (
            f"is made for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "is made without CUDA"
        )
        raise UserError(
            f"{key}=auto: torch {torch.__version__} {built} and cannot use this machine's NVIDIA"
            " GPU; update its driver (CUDA 13 needs 580 or later), or install torch for CUDA 12:"
            f" pip install --force-reinstall torch --index-url {CUDA_12}; or decode on the CPU:"
            f" {key}=cpu"
        )
    return torch.device("cpu")


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current device inside `with`, so that streams and graphs are made on it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def as_array(tensor: Tensor) -> Any:
    """Return the same memory as a NumPy array, whose look-ups are faster; None off the CPU."""
    return tensor.numpy() if tensor.device.type == "cpu" else None


def fastest(tensor: Tensor) -> Any:
    """Return the same memory as a NumPy array on the CPU, the tensor itself elsewhere."""
    array = as_array(tensor)
    return tensor if array is None else array


def on_host_like(tensor: Tensor) -> Tensor:
    """Return zeros like a tensor on the host, in pinned memory if the tensor is on a GPU."""
    return torch.zeros_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def fetch(tensor: Tensor, into: Tensor) -> Tensor:
    into.copy_(tensor, non_blocking=True)
    synchronize(tensor.device)
    return into


def free_bytes(device: torch.device) -> int:
    # torch reserves memory that no tensor uses
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def give_back(device: torch.device) -> None:
    if device.type == "cuda":
        # freeing memory would break other threads' captures
        with _capturing, current(device):
            torch.cuda.empty_cache()


class RefusesHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with`, operators that read a value on the host, and transfers, raise UserError."""

    READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
    TRANSFERS = frozenset({torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default})

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode operators come whole that consist of others
            out = operator.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        waits = not self.READS.isdisjoint(operator.tags)
        if operator is torch.ops.aten.index.Tensor:  # tagged for masks as indices
            waits = any(index is not None and index.dtype is torch.bool for index in args[1])
        out = operator(*args, **kwargs)
        if operator in self.TRANSFERS:  # to a tensor from another one, or of one
            waits = args[:2][-1].device.type != out.device.type
        if waits:
            raise UserError(
                f"execution=graph: a step of this model calls {operator}, which waits for the host,"
                " as no captured step can; use execution=eager or auto"
            )
        return out


class Graphs:
    """The graphs of one target, which share memory: results are read before the next replay.

    PyTorch frees the pool with its last graph, so a dummy graph keeps it alive.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._dummy: Any = None
        self._tensor: Any = None

    def capture(self, run: Run, warm_up: Run) -> Run:
        """Run `warm_up`, then capture `run` without running it; return what replays it.

        Raises:
            UserError: `warm_up` waits for the host; nothing was captured.
        """
        with RefusesHostReads():  # type: ignore[no-untyped-call]
            warm_up()
        # the outer stream is set again at the end, as torch does not after a capture that fails
        with _capturing, current(self.device), torch.cuda.stream(torch.cuda.current_stream()):
            stream = _stream(self.device)
            now = torch.cuda.current_stream()
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    warm_up()
            now.wait_stream(stream)
            if self._dummy is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._dummy = self._graph(self._allocate, stream)
            _clear_workspaces()  # the graph allocates its own, in the pool,
            try:
                replay: Run = self._graph(run, stream).replay
            finally:
                _clear_workspaces()  # and nothing else uses it
            return replay

    def _allocate(self) -> None:
        self._tensor = torch.zeros(1, device=self.device)

    def _graph(self, run: Run, stream: Any) -> Any:
        # thread_local: other threads may go on with calls that a capture forbids
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            run()
        return graph


@cache
def _stream(device: torch.device) -> Any:
    # one for all captures, as cuBLAS keeps 32 MiB for each stream
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _clear_workspaces() -> None:
    # builds without CUDA have none
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


_cudnn = threading.RLock()
_cudnn_was_on: list[bool] = []  # as each block that has not ended yet began


@contextmanager
def _cudnn_off() -> Iterator[None]:
    with _cudnn:
        _cudnn_was_on.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _cudnn:  # only the first one's is on
            torch.backends.cuda.enable_cudnn_sdp(_cudnn_was_on.pop())


def without_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Turn cuDNN's attention off inside `with` on a GPU, as it plans anew for every shape."""
    return _cudnn_off() if device.type == "cuda" else nullcontext()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


_turns: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
_making = threading.RLock()


def turns_of(model: Any) -> Any:
    """Return a transformers model's lock, one for all its targets and shallow copies.

    It is re-entrant, as the garbage collector may close an abandoned answer inside a step.
    """
    with _making:
        return _turns.setdefault(model.get_decoder(), threading.RLock())
