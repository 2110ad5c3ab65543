"""Choose how linear layers multiply on a CPU, by times measured once per machine and shape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from ..errors import UserError
from ..files import measured_once, processor, quartiles
from .linear import (
    ROWS,
    Layouts,
    Packed,
    half_bytes,
    is_narrow,
    linear_bytes,
    own_product,
    packable,
    plain_linears,
)

SECONDS = 0.05  # for each number of ROWS, and at least RUNS of each layout
RUNS = 4
WEIGHTS = 1 << 19  # maximum elements of a weight that are timed: some of its outputs represent all
COPIES = 8  # of the weight, timed in turns, so that none is in the processor's cache
IMPORTANCE = 8, 4, 2, 1  # of the times for ROWS: most steps are plain ones or short drafts
# maximum share of torch's time that a copy may take where it is used, as a call's checks cost, too
WORTH = 0.8
GAIN = 0.5  # what a copy of the weights must save of the sum of IMPORTANCE
Linear = Literal["auto", "half", "onednn", "fused", "torch"]
LINEAR: tuple[str, ...] = get_args(Linear)
Times = dict[str, list[float]]  # by layout: microseconds of a product for each number of ROWS


def choose_linear(model: Any, name: str = "auto") -> Layouts:
    """Return how linear layers multiply.

    On a CPU, auto measures the layouts whose copies fit into half of the free memory; on CUDA, it
    fuses products.
    """
    if name not in LINEAR:
        raise UserError(f"linear={name}: there is {', '.join(LINEAR)}")
    if any(hasattr(parameter, "__tensor_flatten__") for parameter in model.parameters()):
        if name not in ("auto", "torch"):
            raise UserError(f"linear={name}: is for weights that are not quantised")
        return Layouts(("torch",), auto=name == "auto")
    weight = model.get_input_embeddings().weight
    narrow = is_narrow(model)
    half = half_bytes(model)
    packs = packable(weight.device, torch.float32 if narrow else weight.dtype)
    if (name == "onednn" and not packs) or (name == "half" and not half):
        raise UserError(
            f"linear={name}: is for one x86 processor; half for float32 and float16 whose values"
            " have 16 bits, onednn for float32 and, where it gains, bfloat16; this model is"
            f" {weight.dtype} on {weight.device}"
        )
    if name != "auto":
        return Layouts((name,))
    free = psutil.virtual_memory().available / 2
    fit = ["half"] * (half > 0 and (narrow or half < free))
    fit += ["onednn"] * (packs and not narrow and 0 < linear_bytes(model) < free)
    if fit:
        return fastest_of(model, fit)
    return Layouts(("fused" if weight.device.type == "cuda" else "torch",), auto=True)


def fastest_of(model: nn.Module, possible: Sequence[str]) -> Layouts:
    layers = plain_linears(model)
    counts = Counter(layer.weight.shape for layer in layers)
    weight = max(
        (layer.weight for layer in layers), key=lambda weight: counts[weight.shape] * weight.numel()
    )
    dtype = torch.float32 if is_narrow(model) else weight.dtype
    conditions = (
        processor(),
        torch.__version__,
        torch.get_num_threads(),
        dtype,
        weight.dtype,
        weight.shape,
        possible,
    )

    def timed() -> tuple[Times, bool]:
        outputs, inputs = weight.shape
        size = COPIES, min(outputs, WEIGHTS // inputs + 1), inputs
        return measure(torch.full(size, 0.5, dtype=weight.dtype, device="cpu"), dtype, possible)

    return fastest(measured_once(conditions, timed, ("torch", *possible), len(ROWS)))


def fastest(times: Times) -> Layouts:
    shares = {name: np.divide(each, times["torch"]) for name, each in times.items()}

    def cost(name: str) -> float:
        used = np.where(shares[name] < WORTH, shares[name], 1.0)
        return float(np.dot(IMPORTANCE, used)) + GAIN * (name != "torch")

    best = min(times, key=cost)
    names = [best if share < WORTH else "torch" for share in shares[best]]
    listed = "; ".join(f"{name} {seconds}" for name, seconds in times.items())
    measured = f"microseconds of a layer with {list(ROWS)} rows: {listed}"
    return Layouts(tuple(names), measured, auto=True)


@torch.inference_mode()
def measure(weights: Tensor, dtype: torch.dtype, possible: Sequence[str]) -> tuple[Times, bool]:
    """Time products with weights (COPIES, out, in) in turns: lower quartiles.

    Returns False, too, if other processes disturbed them.
    """
    products = {"torch": [partial(own_product, weight=weight, bias=None) for weight in weights]}
    for name in possible:
        copies = [
            Packed(weight, half=name == "half", wide=weights.dtype is not dtype)
            for weight in weights
        ]
        if copies[0].packed is not None:
            products[name] = [partial(copy.product, bias=None) for copy in copies]

    times = {name: list[float]() for name in products}
    calm = True
    for rows in ROWS:
        input = weights.new_ones(1, rows, weights.shape[2], dtype=dtype)
        runs = {name: list[float]() for name in products}
        end = time.perf_counter() + SECONDS
        while len(runs["torch"]) < RUNS or time.perf_counter() < end:
            for name, seconds in runs.items():
                product = products[name][len(seconds) % COPIES]
                start = time.perf_counter()
                product(input)
                seconds.append(time.perf_counter() - start)
        typical, undisturbed = quartiles(runs)
        calm &= undisturbed
        for name, microseconds in typical.items():
            times[name].append(microseconds)

    return times, calm
