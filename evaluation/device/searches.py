"""The greatest logits after every node: how this project finds them against torch, for real models' vocabularies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from model.decoding.devices import synchronize
from model.decoding.sampling import GREEDY, Choice

from .checks import failure
from .forecast import K
from .plan import PUBLISHED, Plan
from .report import Report
from .subjects import named

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
