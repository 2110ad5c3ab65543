"""Time the tree attention kernel against SDPA and FlexAttention, and top-k against torch's."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from model.decoding.attention import TreeAttention, tree_attention_reference
from transformers import AttentionInterface

from model.decoding.devices import synchronize, triton_problem
from model.decoding.sampling import GREEDY, Choice
from model.decoding.tree import Tree

from .checks import error_line
from .forecast import K
from .plan import PUBLISHED, ReportPlan, dtype_name
from .report import Report

SHARE = 0.97  # of the time, with all sections before
HEADS = ((32, 32, 128), (32, 8, 128))  # H, Hkv, D: Vicuna-7B's and Llama-3-8B's
NODES = (1, 81)  # with the root
LENGTHS = (500, 2000)
REPEATS = 7
LONGEST = 15.0  # seconds of a case, mostly compiling; a guess until one is measured


MOST_LAYERS = 64
BEYOND_L2 = 256 << 20  # bytes of keys and values that a timed graph touches; an H200's L2 holds 60 MB
Layer = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of one layer's k and v


@dataclass(frozen=True)
class Case:
    """One shape: H, Hkv, D, nodes n, committed tokens."""

    heads: int
    kv_heads: int
    dim: int
    nodes: int
    length: int

    @property
    def capacity(self) -> int:
        return 1 << (self.length + self.nodes - 1).bit_length()

    def nbytes(self, itemsize: int) -> int:
        """Return the bytes to move: used keys and values, queries and outputs, once each."""
        used = self.kv_heads * (self.length + self.nodes) + self.heads * self.nodes
        return 2 * used * self.dim * itemsize


def median_seconds(call: Call, layers: list[Layer], repeats: int) -> float:
    """Time one call: the median over replays of a graph (CUDA) or loops (CPU) of one call per layer."""

    def loop() -> None:
        for k, v in layers:
            call(k, v)

    def nothing() -> None:
        """Wait for nothing, on a CPU."""

    run: Callable[[], None] = loop
    wait: Callable[[], None] = nothing
    loop()
    if layers[0][0].is_cuda:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loop()
        run, wait = graph.replay, torch.cuda.synchronize
        run()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / len(layers)


def sdpa_call(case: Case, q: torch.Tensor, ancestors: torch.Tensor) -> Call:
    """Return a call of transformers' sdpa on the used part of the cache; additive mask (1, 1, n, length + n)."""
    used = case.length + case.nodes
    mask = torch.zeros(1, 1, case.nodes, used, dtype=q.dtype, device=q.device)
    mask[..., case.length :].masked_fill_(~ancestors, torch.finfo(q.dtype).min)
    module, sdpa = SimpleNamespace(num_key_value_groups=case.heads // case.kv_heads), AttentionInterface()["sdpa"]

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = sdpa(module, q, k[:, :, :used], v[:, :, :used], mask, scaling=case.dim**-0.5)[0]
        return output.transpose(1, 2)

    return call


def flex_call(case: Case, q: torch.Tensor, ancestors: torch.Tensor, length: torch.Tensor) -> Call:
    """Return a call of FlexAttention over the whole capacity; its block mask skips rows behind the draft."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def mask(b: torch.Tensor, h: torch.Tensor, node: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        other = row - length
        inside = (other >= 0) & (other < case.nodes)
        return (row < length) | (inside & ancestors[node, other.clamp(0, case.nodes - 1)])

    blocks = create_block_mask(mask, None, None, case.nodes, case.capacity, device=str(q.device))
    torch.compiler.reset()  # else later cases exceed the limit of recompilations and run uncompiled
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=case.heads != case.kv_heads)


def measure_case(case: Case, dtype: torch.dtype, device: torch.device, repeats: int = REPEATS) -> dict[str, Any]:
    """Return one row of the table: microseconds per layer by kernel; None and a note for one that fails.

    On CUDA a graph of many layers is replayed, each with its own cache, so that keys and values come from memory as in
    a model and not from the L2 cache. GB/s counts used rows of the cache, queries and outputs once.
    """
    torch.manual_seed(0)
    count = max(1, min(MOST_LAYERS, BEYOND_L2 // case.nbytes(dtype.itemsize))) if device.type == "cuda" else 2
    shape = (1, case.kv_heads, case.capacity, case.dim)
    layers = [
        (torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, dtype=dtype, device=device))
        for _ in range(count)
    ]
    q = torch.randn(1, case.nodes, case.heads, case.dim, dtype=dtype, device=device).transpose(1, 2)
    rng = random.Random(0)
    parents = sorted(rng.randrange(max(1, i // 2)) for i in range(1, case.nodes))
    ancestors = Tree([0, *parents]).ancestors.to(device)
    length = torch.tensor(case.length, device=device)
    sizes = (case.heads, case.kv_heads, case.dim, case.nodes, case.capacity)

    ours = TreeAttention(*sizes, length, dtype)
    ours.set_tree(ancestors)
    expected = tree_attention_reference(q, *layers[0], length, ancestors).float()
    row: dict[str, Any] = asdict(case) | {"layers": count, "backend": ours.backend, "notes": {}}
    calls: dict[str, Callable[[], Call]] = {
        "tree": lambda: partial(ours, q),
        "sdpa": lambda: sdpa_call(case, q, ancestors),
        "flex": lambda: flex_call(case, q, ancestors, length),
    }
    if device.type != "cuda":
        del calls["flex"]  # it would compile C++ for half a minute
    for name, make in calls.items():
        try:
            call = make()
            row[f"{name}_error"] = float((call(*layers[0]).float() - expected).abs().max())
            row[f"{name}_us"] = 1e6 * median_seconds(call, layers, repeats)
        except Exception as error:  # go on without another kernel, and note it
            if name == "tree":
                raise
            row[f"{name}_us"], row["notes"][name] = None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if ours.backend == "triton":
        row["plan"] = asdict(ours.plan)
    row["gb_per_s"] = case.nbytes(dtype.itemsize) / row["tree_us"] / 1e3
    return row


def compare_kernels(plan: ReportPlan, report: Report) -> dict[str, Any]:
    """Return rows of microseconds per layer, each saved at once, or why they were skipped."""
    if plan.device.type != "cuda":
        return {"rows": [], "problem": "skipped: the kernel is for CUDA"}
    if why := triton_problem(plan.device):
        return {"rows": [], "problem": f"skipped: {why}"}
    rows: list[dict[str, Any]] = []
    longest = LONGEST
    for heads in HEADS:
        for nodes in NODES:
            for length in LENGTHS:
                if report.budget.left(SHARE) < longest:
                    report.note(f"kernel: {heads[0]}/{heads[1]} heads, {nodes} nodes at {length} tokens was cut")
                    continue
                started = report.budget.spent()
                case = Case(*heads, nodes, length)
                try:
                    with torch.inference_mode():
                        rows.append(measure_case(case, plan.dtypes[0], plan.device))
                except Exception as error:
                    rows.append(asdict(case) | {"error": error_line(error)})
                longest = report.budget.spent() - started
                report.keep(kernel={"rows": rows, "dtype": dtype_name(plan.dtypes[0]), "problem": None})
    return {"rows": rows, "dtype": dtype_name(plan.dtypes[0]), "problem": None}


VOCABULARIES = {"Vicuna": 32000, "Llama-3": 128256, "Qwen3": 151936}
CALLS = 8  # of a repeat; on a CPU, where a call is slow, one call


def compare_searches(plan: ReportPlan, report: Report) -> dict[str, Any]:
    """Time arg-max and top-k of the published tree's logits, (81, V), in microseconds."""
    device, dtype = plan.device, plan.dtypes[0]
    rows: list[dict[str, Any]] = []
    for model, vocab in VOCABULARIES.items():
        if report.budget.left() <= 0:
            report.note(f"greatest logits: {model}'s vocabulary was cut, the time was used up")
            continue
        row = {"model": model, "vocab": vocab}
        try:
            rows.append(row | _compare_search(torch.randn(1 + PUBLISHED, vocab, device=device, dtype=dtype)))
        except Exception as error:  # a failure is a result; go on
            rows.append(row | {"error": error_line(error)})
    searches = {"rows": rows, "dtype": dtype_name(dtype)}
    report.keep(searches=searches)
    return searches


def _compare_search(logits: torch.Tensor) -> dict[str, Any]:
    """Return whether this engine's search is right, and microseconds of it and torch's, medians of paired repeats."""
    choice = Choice(GREEDY, logits.device)
    ways = {"own": partial(_engine_search, choice, logits), "torch": partial(_torch_search, logits)}
    (first, best), (_, expected) = ways["own"](), ways["torch"]()
    greatest = logits.gather(1, expected)  # any of equal logits is right
    right = torch.equal(logits.gather(1, best), greatest) and torch.equal(
        logits.gather(1, first[:, None]), greatest[:, :1]
    )
    runs = {name: _captured(way, logits.is_cuda) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS if logits.is_cuda else 2):
        for name, run in runs.items():
            synchronize(logits.device)
            start = time.perf_counter()
            run()
            synchronize(logits.device)
            times[name].append((time.perf_counter() - start) / (CALLS if logits.is_cuda else 1))
    return {"right": right} | {f"{name}_us": 1e6 * statistics.median(seconds) for name, seconds in times.items()}


def _engine_search(choice: Choice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    choices, best, _ = choice.ranked(logits, None, K)
    assert best is not None
    return choices, best


def _torch_search(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(dim=-1), logits.topk(K, dim=-1).indices


def _captured(search: Callable[[], Any], cuda: bool) -> Callable[[], Any]:
    """On CUDA capture several calls in a graph, as in a step; the host's time would hide the device's."""
    if not cuda:
        return search

    def loop() -> None:
        for _ in range(CALLS):
            search()

    loop()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop()
    return graph.replay
