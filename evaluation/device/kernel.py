"""The tree attention kernel against SDPA under a mask and FlexAttention, as `tools.bench_attention` times them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from model.decoding.devices import triton_problem

from .checks import failure
from .plan import Plan
from .report import Report
from .subjects import named

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
