"""Verification: which drafted nodes are what the target itself picks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .drafter import Draft
from .selection import argmax
from .tree import Tree


@dataclass(slots=True)
class Verification:
    """The outcome of one target forward over a draft of n nodes.

    Attributes:
        draft: what was tried.
        choices: int64 (n,); the token that the target picks after each node.
        stands: bool (n,); whether the node and all above it are what the target picks. The root always stands.
        node: the deepest standing node, 0 if only the root stands.
        tokens: the accepted drafts, then the target's own next token (the bonus). Never empty.
        logits: (n, V), for a drafter that asked for them.
        hidden: (n, H), the same.
    """

    draft: Draft
    choices: torch.Tensor
    stands: torch.Tensor
    node: int
    tokens: list[int]
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @property
    def path(self) -> list[int]:
        """The accepted nodes, root first."""
        return self.draft.tree.chain_of[self.node]


def verify(draft: Draft, logits: torch.Tensor) -> Verification:
    """Greedy verification: a node stands if its token is its parent's choice and its parent stands.

    The deepest standing node wins (the first of them in breadth-first order) and its choice is the bonus token. Runs on
    the device; one small copy to the host, of the winner and the choices along its path.

    Args:
        draft: tree and tokens, n nodes.
        logits: (n, V), the target's logits after each node.
    """
    tree, tokens = draft.tree, draft.tokens
    choices = argmax(logits)  # (n,)
    if choices.device.type == "cpu":
        picked = choices.tolist()
        standing, node = deepest(tree, tokens.tolist(), picked)
        stands = torch.from_numpy(np.array(standing))
        return Verification(draft, choices, stands, node, [picked[i] for i in tree.chain_of[node]])
    stands, winner, path = deepest_on_device(tree, tokens, choices)
    node, *chosen = torch.cat((winner, choices.index_select(0, path))).tolist()  # the only transfer of a step
    return Verification(draft, choices, stands, node, chosen[: tree.depth_of[node] + 1])


def deepest_on_device(
    tree: Tree, tokens: torch.Tensor, choices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which nodes stand, bool (n,); the deepest of them, (1,); its path, (max_depth + 1,), itself repeated at the end.

    No host value is read: an index of no dimension would be, so the winner keeps one.
    """
    matches = tokens == choices.index_select(0, tree.parents)  # (n,)
    stands = (matches | tree.missing).all(dim=-1)  # (n,): every ancestor and the node itself match
    winner = (tree.depths * stands).argmax(keepdim=True)  # (1,): argmax gives the first of equals
    return stands, winner, tree.paths.index_select(0, winner)[0]


def deepest(tree: Tree, tokens: list[int], choices: list[int]) -> tuple[list[bool], int]:
    """The same on the host, found from parents to children: which nodes stand, and the deepest of them."""
    best, standing = 0, [True] * len(tree)
    for node in range(1, len(tree)):
        parent = tree.parent_of[node]
        standing[node] = standing[parent] and tokens[node] == choices[parent]
        if standing[node] and tree.depth_of[node] > tree.depth_of[best]:
            best = node
    return standing, best
