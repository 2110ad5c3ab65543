"""Verification: which drafted nodes are what the target itself picks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .tree import Draft, Tree


@dataclass(slots=True)
class Verification:
    """The outcome of one target forward over a draft of n nodes.

    Attributes:
        draft: what was tried.
        choices: int64 (n,); the token that the target picks after each node.
        stands: bool (n,); whether the node and all above it are what the target picks. The root always stands.
        node: the deepest standing node, 0 if only the root stands.
        tokens: the accepted drafts, then the target's own next token (the bonus). Never empty. Before a session
            observes, `cut` at the answer's end, unlike all the others.
        logits: (n, V), for a drafter that asked for them.
        candidates: int64 (n, k), bits: (n, k), hidden: (n, H), the same; bits as `selection.top_k_and_bits` has them.
    """

    draft: Draft
    choices: torch.Tensor
    stands: torch.Tensor
    node: int
    tokens: list[int]
    logits: torch.Tensor | None = None
    candidates: torch.Tensor | None = None
    bits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @property
    def path(self) -> list[int]:
        """The accepted nodes, root first."""
        return self.draft.tree.chain_of[self.node]

    def cut(self, room: int, eos: Collection[int]) -> None:
        """Leave out tokens behind the answer's end, so that nobody learns text that is not put out.

        Args:
            room: tokens that the answer may still have, at least 1.
            eos: ids that end it; the first of them stays.
        """
        ends = (place for place, token in enumerate(self.tokens, 1) if token in eos)
        self.tokens = self.tokens[: min(room, next(ends, room))]


def standing(tree: Tree, tokens: Any, choices: Any, *, out: torch.Tensor | None = None) -> tuple[Any, Any]:
    """The rule: a node stands if its token is what is picked after its parent, and its parent stands.

    What is picked after a node, `choices`, is the caller's to say. Of lists the rule is followed from parents to
    children; of tensors all at once, without a host value, as a device likes it. (NumPy's arrays are no third form:
    ten small calls behind a forward that has emptied the caches take 70 us more than the walk.)

    Args:
        tokens, choices: (n,) each, lists or int64 tensors on the tree's device.
        out: bool (n,), which nodes stand, for a caller whose tensors stay where they are.

    Returns:
        Which nodes stand, (n,), and the deepest of them, the first in breadth-first order: a list and a number, or
        tensors (n,) and (1,).
    """
    if isinstance(tokens, list):
        best, stands = 0, [True] * len(tokens)
        for node in range(1, len(tokens)):
            parent = tree.parent_of[node]
            stands[node] = stands[parent] and tokens[node] == choices[parent]
            if stands[node] and tree.depth_of[node] > tree.depth_of[best]:
                best = node
        return stands, best
    matches = tokens == choices.index_select(0, tree.parents)
    upright: Any = torch.all(matches | tree.missing, -1, out=out)  # (n,): it and all its ancestors match
    return upright, (tree.depths * upright).argmax(keepdim=True)  # (1,): an index of no dimension is read on the host


def verify(draft: Draft, choices: torch.Tensor) -> Verification:
    """The draft beside what the target picks: the deepest standing node wins and its choice is the bonus token.

    Runs where the tree is: on a device one small copy goes to the host, of the winner and the choices along its path;
    for a tree that is the host's it is the choices.

    Args:
        draft: tree and tokens, n nodes.
        choices: int64 (n,), the token that the target picks after each node: the arg-max of its logits, decoding
            greedily.
    """
    tree = draft.tree
    if tree.device.type == "cpu":
        choices = choices.cpu()
        picked = choices.tolist()
        stands, node = standing(tree, draft.tokens.tolist(), picked)
        stood = torch.from_numpy(np.array(stands))
        return Verification(draft, choices, stood, node, [picked[i] for i in tree.chain_of[node]])
    stands, winner = standing(tree, draft.tokens, choices)
    path = tree.paths.index_select(0, winner)[0]  # (max_depth + 1,), itself repeated at the end
    return told(draft, choices, stands, torch.cat((winner, choices.index_select(0, path))).tolist())


def told(draft: Draft, choices: torch.Tensor, stands: torch.Tensor, report: list[int]) -> Verification:
    """A verification on a device by what the host was told of it.

    Args:
        report: 1 + max_depth + 1 numbers: the deepest standing node, and the choices along its path.
    """
    node, *chosen = report
    return Verification(draft, choices, stands, node, chosen[: draft.tree.depth_of[node] + 1])
