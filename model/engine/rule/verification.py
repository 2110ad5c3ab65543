"""Verification: which drafted nodes are accepted, and where they go in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...devices import fetch, on_host_like
from .sampling import Ends
from .tree import Draft, Tree


@dataclass(slots=True)
class Verification:
    """The outcome of one target forward over a draft of n nodes."""

    draft: Draft
    choices: Tensor  # int64 (n,), the target's token after each node
    # bool (n,), the node and all its ancestors are the target's choices; the root always is; on the
    # host, but for steps on the device
    accepted: Tensor
    node: int  # the deepest accepted node, 0 if only the root is accepted
    # The accepted drafts, then the target's own next token (the bonus). Never empty. `cut` at the
    # answer's end before a session observes it; the other fields are not.
    tokens: list[int]
    logits: Tensor | None = None  # (n, V)
    candidates: Tensor | None = None  # int64 (n, k)
    log_probs: Tensor | None = None  # (n, k), as `sampling.top_k_log_probs` has them
    hidden: Tensor | None = None  # (n, w H)

    @property
    def path(self) -> list[int]:
        return self.draft.tree.chain_of[self.node]

    def cut(self, over: Ends) -> None:
        """Drop tokens after the answer's end, so that no drafter learns them."""
        ends = (count for count in range(1, len(self.tokens) + 1) if over(self.tokens[:count]))
        self.tokens = self.tokens[: next(ends, None)]


def accepted_nodes(
    tree: Tree, tokens: Sequence[int], choices: Sequence[int]
) -> tuple[list[bool], int]:
    """Accept a node if its parent is accepted and its token is the choice after the parent.

    Args:
        tokens, choices: (n,) each.

    Returns:
        Which nodes are accepted, and the deepest of them, the first in breadth-first order.
    """
    deepest = 0
    accepted = [True] * len(tokens)
    for node in range(1, len(tokens)):
        parent = tree.parent_of[node]
        accepted[node] = accepted[parent] and tokens[node] == choices[parent]
        if accepted[node] and tree.depth_of[node] > tree.depth_of[deepest]:
            deepest = node
    return accepted, deepest


def verify(draft: Draft, choices: Tensor, tokens: Tensor | None = None) -> Verification:
    """Compare a draft with the target's choices: the deepest accepted node's is the bonus token.

    Args:
        choices: int64 (n,).
        tokens: the draft's, if the host has tokens and choices already.
    """
    tree = draft.tree
    if tokens is None:
        tokens = draft.tokens
        choices = choices.to(tree.device)
    host_choices = choices.tolist()
    accepted, node = accepted_nodes(tree, tokens.tolist(), host_choices)
    mask = torch.from_numpy(np.array(accepted))
    return Verification(draft, choices, mask, node, [host_choices[i] for i in tree.chain_of[node]])


class Commit:
    """Ends steps with one tree of n nodes on the device; its buffers are never reallocated.

    Attributes:
        root, length: int64 (1,) and (), the next root and length after a call.
        report: int64 (1 + max_depth + 1,), for the host: the deepest accepted node, and the choices
            along its path.
        accepted: bool (n,).
        source, to: int64 (max_depth + 1,): positions in the cache of the accepted path, and where
            to move them; padded by the last node.
    """

    def __init__(self, tree: Tree, length: Tensor) -> None:
        depth = tree.max_depth
        device = tree.device
        self.tree = tree
        self.length = length
        self.root = torch.zeros(1, dtype=torch.long, device=device)
        self.report = torch.zeros(2 + depth, dtype=torch.long, device=device)
        self.accepted = self.source = self.to = self.report  # until the first call
        self._depths = torch.arange(depth + 1, device=device)
        # (n,): tokens that a step adds if this is its deepest accepted node
        self._added = tree.depths + 1
        self._host_report = on_host_like(self.report)

    # a step's draft and the target's choices: int64 (n,) each
    def __call__(self, tokens: Tensor, choices: Tensor) -> None:
        tree = self.tree
        matches = tokens == choices.index_select(0, tree.parents)
        self.accepted = (matches | tree.missing).all(-1)  # node and ancestors match
        # (1,): indexing with a 0-d tensor forces a device sync
        winner = (tree.depths * self.accepted).argmax(keepdim=True)
        path = tree.paths.index_select(0, winner)[0]  # (max_depth + 1,), itself repeated at the end
        self.source = path + self.length
        self.to = self._depths + self.length
        torch.cat((winner, choices.index_select(0, path)), out=self.report)
        torch.index_select(choices, 0, winner, out=self.root)
        self.length.add_(self._added.index_select(0, winner)[0])

    def read(self) -> list[int]:
        """Return the report: the only transfer of a step, for which the host waits."""
        return fetch(self.report, self._host_report).tolist()
