"""The Triton kernels of the adjacency matrix: a whole tree grown, and a whole step written, by one program each.

By torch a level takes three small launches and a step's writing ten, some fifty microseconds on a GPU however small the
model. They say the same as `AdjacencyMatrix` and `TokenRecycling`, and are tried against these.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs

from __future__ import annotations

import random

import torch
import triton
import triton.language as tl

from ..decoding import Tree, kernels
from .drafter import TokenRecycling


@triton.jit
def grow_kernel(
    candidates_ptr, root_ptr, parents_ptr, ranks_ptr, depths_ptr, tokens_ptr, nodes, max_depth, k, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (1,): token(node) = M[token(parent), rank(node)], level by level, in registers."""
    node = tl.arange(0, BLOCK)
    there = node < nodes
    parent = tl.load(parents_ptr + node, mask=there, other=0).to(tl.int32)
    rank = tl.load(ranks_ptr + node, mask=there, other=0)
    depth = tl.load(depths_ptr + node, mask=there, other=0).to(tl.int32)
    tokens = tl.zeros((BLOCK,), tl.int64) + tl.load(root_ptr)
    for level in range(1, max_depth + 1):
        at = tl.gather(tokens, parent, 0) * k + rank
        found = tl.load(candidates_ptr + at, mask=depth == level, other=0).to(tl.int64)
        tokens = tl.where(depth == level, found, tokens)
    tl.store(tokens_ptr + node, tokens, mask=there)


@triton.jit
def write_kernel(
    candidates_ptr, tokens_ptr, best_ptr, stands_ptr, eos_ptr, nodes, k, eos,
    ONLY_STANDING: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (1,): the last kept node of each token writes its row. Nothing is, where an EOS among the drafts stands."""
    node, rank = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    there = node < nodes
    token = tl.load(tokens_ptr + node, mask=there, other=-1)
    stands = tl.load(stands_ptr + node, mask=there, other=0).to(tl.int32)
    ended = tl.zeros((BLOCK,), tl.int32)
    for i in range(eos):
        is_end = (token == tl.load(eos_ptr + i)) & (node > 0)  # the root is no draft
        ended = ended | (is_end.to(tl.int32) & stands)
    writes = there & (tl.max(ended, 0) == 0)
    if ONLY_STANDING:
        writes = writes & (stands != 0)
    for i in range(1, nodes):
        later = (token == tl.load(tokens_ptr + i)) & (node < i)
        if ONLY_STANDING:
            later = later & (tl.load(stands_ptr + i) != 0)
        writes = writes & (later == 0)
    both = writes[:, None] & (rank < k)[None, :]  # (BLOCK, BLOCK_K)
    best = tl.load(best_ptr + node[:, None] * k + rank[None, :], mask=both, other=0)
    to = candidates_ptr + token[:, None] * k + rank[None, :]
    tl.store(to, best.to(candidates_ptr.dtype.element_ty), mask=both)


def grow(candidates: torch.Tensor, root: torch.Tensor, tree: Tree, tokens: torch.Tensor) -> None:
    """The tokens (n,) of a tree below root (1,), by candidates (V, k)."""
    with kernels.on(candidates.device):
        grow_kernel[(1,)](
            candidates, root, tree.parents, tree.ranks, tree.depths, tokens,
            len(tree), tree.max_depth, candidates.shape[1], BLOCK=kernels.block(len(tree)), num_warps=1,
        )  # fmt: skip


def write(
    candidates: torch.Tensor,
    tokens: torch.Tensor,
    best: torch.Tensor,
    stands: torch.Tensor,
    eos: torch.Tensor,
    *,
    only_standing: bool,
) -> None:
    """A step's candidates `best` (n, k) into the rows of tokens (n,), of equal tokens the last one's.

    Args:
        stands: bool (n,).
        eos: int64 (m,); where a draft of these stands, nothing is written.
        only_standing: the rows of nodes that stand.
    """
    n, k = best.shape
    with kernels.on(candidates.device):
        write_kernel[(1,)](
            candidates, tokens, best, stands.view(torch.int8), eos, n, k, len(eos),
            ONLY_STANDING=only_standing, BLOCK=kernels.block(n), BLOCK_K=kernels.block(k), num_warps=4,
        )  # fmt: skip


def trial(device: torch.device, nodes: int, levels: int, k: int, dtype: torch.dtype, ends: int) -> str:
    """Trees of so many nodes and levels grown, and their candidates written, against NumPy's way.

    Returns what was wrong, or "".

    ends: how many tokens end an answer.
    """
    rng, vocab, eos = random.Random(0), 2 * k + 4 + ends, list(range(ends))
    for update in ("all", "path"):
        tree = kernels.random_tree(nodes, levels, k, rng)
        own = TokenRecycling(vocab, tree, k=k, dtype=dtype, update=update, eos=eos)  # on the CPU
        candidates = own.matrix.candidates.to(device, copy=True)
        grown, stop = torch.zeros(len(tree), dtype=torch.long, device=device), torch.tensor(eos).long().to(device)
        for step in range(6):
            root = torch.tensor([rng.randrange(vocab)])
            grow(candidates, root.to(device), tree.on(device), grown)
            if grown.tolist() != own.grow(root).tolist():
                return f"does not grow {tree} with k={k} as the matrix does"
            tokens = torch.tensor(
                [rng.randrange(vocab) for _ in range(nodes)]
            )  # what is learnt from may be no such tree
            best = torch.tensor([rng.sample(range(vocab), k) for _ in range(nodes)])
            share = (0.0, 0.1, 2 / nodes)[step % 3]  # of the nodes that stand; where an end does, nothing is written
            stands = torch.tensor([node == 0 or rng.random() < share for node in range(nodes)])
            own.learn(tokens, best, stands)
            there = (tokens.to(device), best.to(device), stands.to(device), stop)
            write(candidates, *there, only_standing=update == "path")
            if candidates.tolist() != own.matrix.candidates.tolist():
                return f"does not write {nodes} nodes with k={k} as the matrix does"
    return ""
