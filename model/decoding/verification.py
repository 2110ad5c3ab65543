"""Verification: which drafted nodes are what the target itself picks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .devices import fastest
from .tree import Draft, Tree


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


def standing(tree: Tree, tokens: Any, choices: Any) -> tuple[Any, Any]:
    """The rule: a node stands if its token is what is picked after its parent, and its parent stands.

    What is picked after a node, `choices`, is the caller's to say. No host value is read of a device's tensors.

    Args:
        tokens, choices: int64 (n,), both tensors on the tree's device or, on the CPU, both NumPy's.

    Returns:
        Which nodes stand, bool (n,); and their depths, 0 for the others, (n,): the first of the greatest is accepted.
    """
    parents, missing, depths = tree.of_kind(tokens)
    stands = ((tokens == choices.take(parents)) | missing).all(-1)  # (n, n) -> (n,): the node and all above it match
    return stands, depths * stands


def verify(draft: Draft, choices: torch.Tensor) -> Verification:
    """The draft beside what the target picks: the deepest standing node wins and its choice is the bonus token.

    Runs on the device; one small copy to the host, of the winner and the choices along its path.

    Args:
        draft: tree and tokens, n nodes.
        choices: int64 (n,), the token that the target picks after each node: the arg-max of its logits, decoding
            greedily.
    """
    tree = draft.tree
    if len(tree) == 1:  # plain decoding: there is nothing to look at
        return Verification(draft, choices, tree.ancestors[0], 0, choices.tolist())
    picked = fastest(choices)
    stands, reached = standing(tree, fastest(draft.tokens), picked)
    if picked is not choices:
        node = int(reached.argmax())
        return Verification(draft, choices, torch.from_numpy(stands), node, picked[tree.chain_of[node]].tolist())
    winner = reached.argmax(keepdim=True)  # of one dimension: an index of none would be read on the host
    return told(draft, choices, stands, torch.cat((winner, choices[tree.paths.index_select(0, winner)[0]])))


def told(draft: Draft, choices: torch.Tensor, stands: torch.Tensor, report: torch.Tensor) -> Verification:
    """A verification on a device, brought to the host: the only transfer of a step.

    Args:
        report: int64 (1 + max_depth + 1,); the deepest standing node, and the choices along its path.
    """
    node, *chosen = report.tolist()
    return Verification(draft, choices, stands, node, chosen[: draft.tree.depth_of[node] + 1])
