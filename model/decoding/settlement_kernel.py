"""The Triton kernel that settles a step: one program instead of some twenty small launches. See settlement.py."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs

from __future__ import annotations

import random
from typing import Any

import torch
import triton
import triton.language as tl

from . import kernels
from .settlement import Settlement
from .tree import Draft
from .verification import verify


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


def launch(own: Settlement, tokens: torch.Tensor, choices: torch.Tensor) -> None:
    """Settle; tokens and choices int64 (n,), tokens contiguous."""
    tree = own.tree
    with kernels.on(tree.device):
        settle_kernel[(1,)](
            tokens, choices, tree.parents, tree.depths, tree.paths, own.root, own.length,
            own.stands.view(torch.int8), own.report, own.source, own.to, choices.stride(0), len(tree), tree.max_depth,
            BLOCK=kernels.block(len(tree)), BLOCK_D=kernels.block(tree.max_depth + 1), num_warps=1,
        )  # fmt: skip


def trial(device: torch.device, nodes: int, levels: int, apart: int) -> str:
    """Random trees of so many nodes and levels against the walk over lists; what was wrong, or "".

    apart: the stride of choices: 1 as an arg-max is, k as the first column of candidates is.
    """
    rng = random.Random(0)
    for _ in range(4):
        tree = kernels.random_tree(nodes, levels, nodes, rng)
        length = torch.tensor(100, device=device)
        own = Settlement(tree.on(device), length)
        for _ in range(3):
            before, tokens = int(length), torch.tensor([rng.randrange(2) for _ in range(nodes)])
            choices = torch.tensor([rng.randrange(2) for _ in range(nodes)])
            launch(own, tokens.to(device), choices.to(device)[:, None].repeat(1, apart)[:, 0])
            expected = verify(Draft(tree, tokens), choices)
            path = expected.path + expected.path[-1:] * (tree.max_depth - tree.depth_of[expected.node])
            found = (own.report, own.stands, own.source - before, own.to - before, own.root, length - before)
            right = (
                [expected.node, *choices[path].tolist()],
                expected.stands.tolist(),
                path,
                list(range(tree.max_depth + 1)),
                expected.tokens[-1:],
                len(expected.tokens),
            )
            told: tuple[Any, ...] = tuple(tensor.tolist() for tensor in found)
            if told != right:
                return f"does not settle {tree} as the walk over it does"
    return ""
