"""The Triton kernel that settles a step: one program instead of some twenty small launches. See settlement.py."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def settle_kernel(
    tokens_ptr, choices_ptr, parents_ptr, depths_ptr, paths_ptr, root_ptr, length_ptr,
    stands_ptr, report_ptr, source_ptr, to_ptr, choice, nodes, max_depth,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (1,), one warp, so that what is read is read before `root` and `length` are written over.

    choice: from one node's choice to the next one's.
    """
    node, depth_now = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    there, along = node < nodes, depth_now <= max_depth
    length = tl.load(length_ptr)
    parent = tl.load(parents_ptr + node, mask=there, other=0).to(tl.int32)  # (BLOCK,)
    depth = tl.load(depths_ptr + node, mask=there, other=-1).to(tl.int32)
    token = tl.load(tokens_ptr + node, mask=there, other=0)
    matches = (token == tl.load(choices_ptr + parent * choice, mask=there, other=-1)).to(tl.int32)
    stands = (node == 0).to(tl.int32)
    for level in range(1, max_depth + 1):
        stands = tl.where(depth == level, tl.gather(stands, parent, 0) & matches, stands)
    # the deepest, and of these the first
    winner = BLOCK - 1 - tl.max(tl.where(stands != 0, depth * BLOCK + BLOCK - 1 - node, 0), 0) % BLOCK
    path = tl.load(paths_ptr + winner * (max_depth + 1) + depth_now, mask=along, other=0)  # (BLOCK_D,)
    tl.store(stands_ptr + node, stands.to(tl.int8), mask=there)
    tl.store(report_ptr, winner.to(tl.int64))
    tl.store(report_ptr + 1 + depth_now, tl.load(choices_ptr + path * choice, mask=along, other=0), mask=along)
    tl.store(source_ptr + depth_now, path + length, mask=along)
    tl.store(to_ptr + depth_now, depth_now + length, mask=along)
    tl.store(root_ptr, tl.load(choices_ptr + winner * choice))
    tl.store(length_ptr, length + 1 + tl.load(depths_ptr + winner))


def launch(own: Any, tokens: torch.Tensor, choices: torch.Tensor) -> None:
    """Settle `own`, a Settlement; tokens and choices int64 (n,), tokens contiguous."""
    tree = own.tree
    settle_kernel[(1,)](
        tokens, choices, tree.parents, tree.depths, tree.paths, own.root, own.length,
        own.stands.view(torch.int8), own.report, own.source, own.to, choices.stride(0), len(tree), tree.max_depth,
        BLOCK=triton.next_power_of_2(len(tree)), BLOCK_D=triton.next_power_of_2(tree.max_depth + 1), num_warps=1,
    )  # fmt: skip
