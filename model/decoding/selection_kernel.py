"""The Triton kernels of the greatest logits: in two stages over the vocabulary. Imported only where Triton runs.

The first reads all logits once and keeps the greatest of every WIDTH columns. The k greatest of a row lie in the k
groups whose maxima are the greatest, so the second looks at the maxima and at k groups alone. A logit and its column
are one number of 64 bits, ordered by the logit and of equal ones by the lower column: so no two are equal, and the
first of the k is the arg-max as torch has it.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import kernels

WIDTH = 128  # columns of a group
GROUPS = 16  # groups of a program of the first stage
_LAST = tl.constexpr(0x7FFFFFFF)  # the lower half of a number is this less its column
_NONE = tl.constexpr(-(1 << 63))  # below all numbers


@triton.jit
def _numbers(logits, columns, vocab):
    """One number for each logit and its column; NaN is above all, as in torch."""
    value = logits.to(tl.float32)
    value = tl.where(value == 0, 0.0, value)  # -0 is no less than 0
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(value != value, _LAST, bits ^ ((bits >> 31) & _LAST))  # below 0 a float's bits fall as it rises
    numbers = (ordered.to(tl.int64) << 32) | (columns ^ _LAST).to(tl.int64)
    return tl.where(columns < vocab, numbers, _NONE)


@triton.jit
def _column(number):
    return ((number & 0xFFFFFFFF) ^ _LAST).to(tl.int32)


@triton.jit
def maxima_kernel(logits_ptr, maxima_ptr, logits_row, vocab, groups, BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr):
    """Grid (n, cdiv(groups, BLOCK_G)): the greatest number of each group, int64 (n, groups)."""
    row, group = tl.program_id(0), tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    columns = group[:, None] * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]  # (BLOCK_G, BLOCK_W)
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_row + columns, mask=columns < vocab, other=0.0)
    numbers = _numbers(logits, columns, vocab)
    tl.store(maxima_ptr + row * groups + group, tl.max(numbers, 1), mask=group < groups)


@triton.jit
def pick_kernel(
    logits_ptr, maxima_ptr, best_ptr, logits_row, vocab, groups, k,
    BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Grid (n,): the columns of the k greatest, best first, int64 (n, k)."""
    row, slot, group = tl.program_id(0), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_G)
    maxima = tl.load(maxima_ptr + row * groups + group, mask=group < groups, other=_NONE)  # (BLOCK_G,)
    first = tl.full((BLOCK_K,), 0, tl.int32) + vocab  # (BLOCK_K,): where each chosen group begins; vocab: none
    for i in range(k):
        top = tl.max(maxima, 0)
        first = tl.where((slot == i) & (top != _NONE), _column(top) // BLOCK_W * BLOCK_W, first)
        maxima = tl.where(maxima == top, _NONE, maxima)
    columns = first[:, None] + tl.arange(0, BLOCK_W)[None, :]  # (BLOCK_K, BLOCK_W)
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_row + columns, mask=columns < vocab, other=0.0)
    numbers = _numbers(logits, columns, vocab)
    for i in range(k):
        top = tl.max(tl.max(numbers, 1), 0)
        tl.store(best_ptr + row * k + i, _column(top).to(tl.int64))
        numbers = tl.where(numbers == top, _NONE, numbers)


def launch(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Both stages: logits (n, V) -> the k greatest, best first, int64 (n, k)."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, vocab = logits.shape
    groups = triton.cdiv(vocab, WIDTH)
    maxima = torch.empty(n, groups, dtype=torch.long, device=logits.device)
    best = torch.empty(n, k, dtype=torch.long, device=logits.device)
    with kernels.on(logits.device):
        maxima_kernel[(n, triton.cdiv(groups, GROUPS))](
            logits, maxima, logits.stride(0), vocab, groups, BLOCK_G=GROUPS, BLOCK_W=WIDTH
        )
        pick_kernel[(n,)](
            logits, maxima, best, logits.stride(0), vocab, groups, k,
            BLOCK_K=kernels.block(k), BLOCK_G=kernels.block(groups), BLOCK_W=WIDTH, num_warps=4 if k <= 8 else 8,
        )  # fmt: skip
    return best


def trial(device: torch.device, vocab: int, k: int, dtype: torch.dtype) -> str:
    """Noise, ties and infinities against a stable sort; what was wrong, or ""."""
    noise = torch.randn(3, vocab, device=device, generator=torch.Generator(device).manual_seed(0))
    values = torch.arange(3 * vocab, device=device).view(3, vocab) * 7919 % 251 - 120  # each one many times
    logits = torch.cat((noise, values)).to(dtype)
    logits[4], logits[5, vocab // 2 :] = 0, float("-inf")
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    right = torch.equal(launch(logits, k), expected) and torch.equal(launch(logits[1:], k), expected[1:])
    return "" if right else f"not the {k} greatest of {vocab} in {dtype}"  # logits[1:]: not aligned where V is odd
