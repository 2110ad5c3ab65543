"""The Triton kernels of tree attention: split over the cache, then reduce. Imported only where Triton runs.

One program takes one KV head, one part of the used rows and one block of query rows. The G query heads that share the
KV head and the n nodes of the draft are packed into the rows of the product, row g * n + i, so that the cache is read
once a KV head and never repeated. The loops end at length + n, which the device reads: cost follows the context in use.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _share(length, nodes, capacity, splits, BLOCK_N: tl.constexpr):
    """Rows in use, and rows a split takes: whole blocks, evenly, so that the first splits take all of them."""
    total = tl.minimum(length + nodes, capacity)
    share = tl.cdiv(tl.cdiv(total, BLOCK_N), splits) * BLOCK_N
    return total, share


@triton.jit
def _fold(
    q, acc, top, norm, k_base, v_base, k_row, v_row, tree, words, node, start, length, total, scale,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Fold cache rows start..start + BLOCK_N into the running softmax. TREE: some row is a draft node or unused."""
    dims = tl.arange(0, BLOCK_D)
    rows = start + tl.arange(0, BLOCK_N)
    k_at = k_base + rows[:, None] * k_row + dims[None, :]  # (BLOCK_N, BLOCK_D)
    v_at = v_base + rows[:, None] * v_row + dims[None, :]
    if TREE:  # an unused row is never loaded: whatever it holds, a weight of 0 would not silence a NaN
        used = (rows < total)[:, None] & (dims < D)[None, :]
        k = tl.load(k_at, mask=used, other=0.0)
        v = tl.load(v_at, mask=used, other=0.0)
    elif D == BLOCK_D:
        k = tl.load(k_at)
        v = tl.load(v_at)
    else:
        k = tl.load(k_at, mask=(dims < D)[None, :], other=0.0)
        v = tl.load(v_at, mask=(dims < D)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (BLOCK_M, BLOCK_N), base 2
    if TREE:
        # The tree as bits: two words of a node hold all that a block of up to 64 rows can ask.
        ahead = start - length  # negative where the block begins among the committed tokens
        word = ahead >> 6  # rounds down, as a division would not
        low = tl.load(tree + node * words + word, mask=(word >= 0) & (word < words), other=0)
        high = tl.load(tree + node * words + word + 1, mask=(word >= -1) & (word + 1 < words), other=0)
        bit = ahead - (word << 6) + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N): 0 to 126
        seen = tl.where(bit < 64, low[:, None] >> (bit & 63), high[:, None] >> (bit & 63)) & 1  # (BLOCK_M, BLOCK_N)
        scores = tl.where((rows < length)[None, :] | (seen != 0), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))  # (BLOCK_M,)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may see nothing here: -inf - -inf is NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    norm = norm * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new_top, norm


@triton.jit
def split_kernel(
    q_ptr, k_ptr, v_ptr, length_ptr, tree_ptr, acc_ptr, top_ptr, norm_ptr,
    q_head, q_node, k_head, k_row, v_head, v_row, words, nodes, group, capacity, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (splits, Hkv, cdiv(G * n, BLOCK_M)): one part's maximum, sum and weighted values, float32."""
    split, kv_head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr).to(tl.int32)
    total, share = _share(length, nodes, capacity, tl.num_programs(0), BLOCK_N)
    first = split * share
    if first >= total:  # nothing is left for this split; the reduction knows, by the same arithmetic
        return
    last = tl.minimum(first + share, total)

    dims = tl.arange(0, BLOCK_D)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,): g * n + i
    node = row % nodes
    head = kv_head * group + row // nodes
    real = (row < group * nodes)[:, None] & (dims < D)[None, :]
    q = tl.load(q_ptr + head[:, None] * q_head + node[:, None] * q_node + dims[None, :], mask=real, other=0.0)
    k_base = k_ptr + kv_head.to(tl.int64) * k_head
    v_base = v_ptr + kv_head.to(tl.int64) * v_head

    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    norm = tl.zeros((BLOCK_M,), dtype=tl.float32)
    plain = tl.maximum(first, tl.minimum(last, length // BLOCK_N * BLOCK_N))  # below: whole blocks of committed tokens
    for start in range(first, plain, BLOCK_N):
        acc, top, norm = _fold(
            q, acc, top, norm, k_base, v_base, k_row, v_row, tree_ptr, words, node, start, length, total, scale,
            D, BLOCK_N, BLOCK_D, False,
        )  # fmt: skip
    for start in range(plain, last, BLOCK_N):
        acc, top, norm = _fold(
            q, acc, top, norm, k_base, v_base, k_row, v_row, tree_ptr, words, node, start, length, total, scale,
            D, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip

    rows = group * nodes
    out = (split * tl.num_programs(1) + kv_head) * rows + row  # (BLOCK_M,): [split, head * n + node]
    tl.store(top_ptr + out, top, mask=row < rows)
    tl.store(norm_ptr + out, norm, mask=row < rows)
    tl.store(acc_ptr + out[:, None].to(tl.int64) * D + dims[None, :], acc, mask=real)


@triton.jit
def reduce_kernel(
    acc_ptr, top_ptr, norm_ptr, length_ptr, out_ptr, nodes, heads, capacity, splits,
    D: tl.constexpr, SPLITS_2: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (H * n,): one row's parts, in the order of the splits, become its output in out (n, H, D)."""
    row = tl.program_id(0)  # head * n + node
    total, share = _share(tl.load(length_ptr).to(tl.int32), nodes, capacity, splits, BLOCK_N)
    parts, dims = tl.arange(0, SPLITS_2), tl.arange(0, BLOCK_D)
    there = (parts < splits) & (parts * share < total)  # what no split wrote is not read: it may be NaN
    at = parts * (heads * nodes) + row
    top = tl.load(top_ptr + at, mask=there, other=float("-inf"))
    norm = tl.load(norm_ptr + at, mask=there, other=0.0)
    weights = tl.exp2(top - tl.max(top, 0))  # (SPLITS_2,); a node sees itself, so that one part is finite
    real = there[:, None] & (dims < D)[None, :]
    acc = tl.load(acc_ptr + at[:, None].to(tl.int64) * D + dims[None, :], mask=real, other=0.0)  # (SPLITS_2, BLOCK_D)
    value = tl.sum(acc * weights[:, None], 0) / tl.sum(norm * weights, 0)
    to = (row % nodes) * heads + row // nodes
    tl.store(out_ptr + to * D + dims, value.to(out_ptr.dtype.element_ty), mask=dims < D)


def launch(attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
    """Both kernels, into its `output`. q (1, H, n, D), k and v (1, Hkv, B, D), unit stride in the last dimension."""
    plan, dim, capacity = attention.plan, attention.head_dim, k.shape[2]
    group, width = attention.heads // attention.kv_heads, max(16, triton.next_power_of_2(attention.head_dim))
    split_kernel[(plan.splits, attention.kv_heads, triton.cdiv(group * attention.nodes, plan.block_m))](
        q, k, v, attention.length, attention.words, attention.partial, attention.maxima, attention.sums,
        q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        attention.words.shape[1], attention.nodes, group, capacity, scale * math.log2(math.e),
        D=dim, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_D=width,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    reduce_kernel[(attention.heads * attention.nodes,)](
        attention.partial, attention.maxima, attention.sums, attention.length, attention.output,
        attention.nodes, attention.heads, capacity, plan.splits,
        D=dim, SPLITS_2=triton.next_power_of_2(plan.splits), BLOCK_N=plan.block_n, BLOCK_D=width,
        num_warps=4 if plan.splits > 4 else 1,
    )  # fmt: skip
