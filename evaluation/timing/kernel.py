"""Time the tree attention kernel against SDPA and FlexAttention, and top-k against torch's."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from model.decoding.devices import synchronize, triton_problem
from model.decoding.sampling import GREEDY, Choice

from .checks import failure
from .forecast import K
from .plan import PUBLISHED, Plan, named
from .report import Report

SHARE = 0.97  # of the time, with all before
HEADS = ((32, 32, 128), (32, 8, 128))  # H, Hkv, D: Vicuna-7B's and Llama-3-8B's
NODES = (1, 81)  # with the root
LENGTHS = (500, 2000)
REPEATS = 7
LONGEST = 15.0  # seconds of a case, most of which compiles; a guess until one was seen


def compare_kernels(plan: Plan, report: Report) -> dict[str, Any]:
    """Rows of microseconds a layer, kept as they come; on a CPU and without these functions why not."""
    if plan.device.type != "cuda":
        return {"rows": [], "problem": "skipped: the kernel is for CUDA"}
    if why := triton_problem(plan.device):
        return {"rows": [], "problem": f"skipped: {why}"}
    try:
        from tools import bench_attention as bench
    except ImportError as error:
        return {"rows": [], "problem": f"skipped: {failure(error)}"}
    rows: list[dict[str, Any]] = []
    longest = LONGEST
    for heads in HEADS:
        for nodes in NODES:
            for length in LENGTHS:
                if report.budget.left(SHARE) < longest:
                    report.note(f"kernel: {heads[0]}/{heads[1]} heads, {nodes} nodes at {length} tokens was cut")
                    continue
                started = report.budget.spent()
                case = bench.Case(*heads, nodes, length)
                try:
                    with torch.inference_mode():
                        rows.append(bench.measure(case, plan.dtypes[0], "cuda", REPEATS, sweep=False))
                except Exception as error:
                    rows.append(dataclasses.asdict(case) | {"error": failure(error)})
                longest = report.budget.spent() - started
                report.keep(kernel={"rows": rows, "dtype": named(plan.dtypes[0]), "problem": None})
    return {"rows": rows, "dtype": named(plan.dtypes[0]), "problem": None}


VOCABULARIES = {"Vicuna": 32000, "Llama-3": 128256, "Qwen3": 151936}
REPEATS, CALLS = 7, 8  # calls of one repeat; on a CPU, where one takes long, it is one call twice


def compare_searches(plan: Plan, report: Report) -> dict[str, Any]:
    """Microseconds for the draft of the published tree, (81, V): arg-max and top-k together. Kept when it is done."""
    device, dtype = plan.device, plan.dtypes[0]
    rows: list[dict[str, Any]] = []
    for model, vocab in VOCABULARIES.items():
        if report.budget.left() <= 0:
            report.note(f"greatest logits: {model}'s vocabulary was cut, the time was used up")
            continue
        row = {"model": model, "vocab": vocab}
        try:
            rows.append(row | _compared(torch.randn(1 + PUBLISHED, vocab, device=device, dtype=dtype)))
        except Exception as error:  # a finding, and the rest is still to be written
            rows.append(row | {"error": failure(error)})
    searches = {"rows": rows, "dtype": named(dtype)}
    report.keep(searches=searches)
    return searches


def _compared(logits: torch.Tensor) -> dict[str, Any]:
    """Whether it is right, and microseconds of both, medians of repeats in turns."""
    choice = Choice(GREEDY, logits.device)
    ways = {"own": partial(_own, choice, logits), "torch": partial(_torchs, logits)}
    (first, best), (_, expected) = ways["own"](), ways["torch"]()
    greatest = logits.gather(1, expected)  # of equals any one will do
    right = torch.equal(logits.gather(1, best), greatest) and torch.equal(
        logits.gather(1, first[:, None]), greatest[:, :1]
    )
    runs = {name: _prepared(way, logits.is_cuda) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS if logits.is_cuda else 2):
        for name, run in runs.items():
            synchronize(logits.device)
            start = time.perf_counter()
            run()
            synchronize(logits.device)
            times[name].append((time.perf_counter() - start) / (CALLS if logits.is_cuda else 1))
    return {"right": right} | {f"{name}_us": 1e6 * statistics.median(seconds) for name, seconds in times.items()}


def _own(choice: Choice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    choices, best, _ = choice.ranked(logits, None, K)
    assert best is not None
    return choices, best


def _torchs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(dim=-1), logits.topk(K, dim=-1).indices


def _prepared(search: Callable[[], Any], cuda: bool) -> Callable[[], Any]:
    """On CUDA several calls captured as they are in a step, where the host's time would hide the device's."""
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
