"""The least time of a step: its bytes and operations at the device's measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from model.decoding import Generation, Target
from model.decoding.devices import synchronize
from model.decoding.linear import pack_linears, packable
from model.quantization import stored_bytes

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


@dataclass(frozen=True)
class Rates:
    """Measured rates of a device: bytes/s of a copy (read and written), FLOP/s of a matrix product."""

    bytes_per_second: float
    flop_per_second: float


@dataclass(frozen=True)
class Cost:
    """The needs of a step: bytes to read once (weights and used cache), floating-point operations."""

    bytes: int
    flop: int

    def floor_seconds(self, rates: Rates) -> float:
        """Return the larger of the two times, which no step can beat."""
        return max(self.bytes / rates.bytes_per_second, self.flop / rates.flop_per_second)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the shortest time of several repeats, as a rate is the best that the device reaches."""
    best = float("inf")
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Time a copy and a product that exceed the caches; takes about a second on a CPU."""
    large = device.type == "cuda"
    words = (2**31 if large else 2**27) // 4
    source = torch.ones(words, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source), device)
    side = 8192 if large else 1024
    a = torch.randn(side, side, device=device).to(dtype)
    product = nn.Linear(side, side, bias=False, device=device, dtype=dtype).requires_grad_(False)
    if packable(device, dtype):
        pack_linears(product)
    multiply = _seconds(lambda: product(a), device)
    return Rates(2 * 4 * words / copy, 2 * side**3 / multiply)


def step_cost(target: Target, nodes: int, context: int) -> Cost:
    """Return a step's needs: every weight but the embedding table and the used cache, read once.

    Args:
        nodes: root included.
        context: tokens in the cache.
    """
    model = target.model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(stored_bytes(p) for p in model.parameters())
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    if embedding is not head:  # only n rows are read, unless it is tied to the head's matrix
        weights -= stored_bytes(embedding)
        matrices -= embedding.numel()
    with target.cache(nodes) as cache:
        per_token = cache.nbytes // cache.capacity
    config = model.config.get_text_config()
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    attention = 4 * nodes * (context + nodes) * width * config.num_hidden_layers  # q k and weights v
    return Cost(weights + per_token * (context + nodes), 2 * nodes * matrices + attention)


def runtime_calls(run: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Count a run's CUDA calls by name (cudaLaunchKernel, cudaMemcpyAsync, ...), with the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        synchronize(device)
    return {
        event.key: int(event.count) for event in profiler.key_averages() if event.key.startswith(("cuda", "cuLaunch"))
    }


def launches(target: Target, answer: Callable[[], Generation]) -> float | None:
    """Count the kernels (or graphs) launched per forward while answering a prompt; None without CUDA."""
    if target.device.type != "cuda":
        return None
    forwards: list[int] = []
    calls = runtime_calls(lambda: forwards.append(answer().forwards), target.device)
    return sum(count for name, count in calls.items() if name in LAUNCHES) / forwards[0]
