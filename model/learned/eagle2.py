"""EAGLE-2: the draft tree follows the head's own confidence (arXiv 2406.16858)."""

from __future__ import annotations

import torch

from ..decoding import Draft, Target, Tree
from ..errors import UserError
from .eagle_drafter import EagleDrafter, EagleSession


class Eagle2(EagleDrafter):
    """Expands the best `top_k` nodes of each depth (4.1), then keeps the best `nodes` of all that were seen (4.2).

    A node's value is the product of the head's probabilities along its path, which stand for acceptance rates.

    Args:
        target, head_path: see `EagleDrafter`.
        depth: of the deepest node.
        top_k: nodes expanded a depth, and children of each.
        nodes: drafted nodes kept, root not counted.
        share_noise: where tokens are drawn, the head's confidence counts the target's own noise, too; not published.

    Raises:
        UserError: what `load_head` raises; a setting below 1, or top_k above the vocabulary.
    """

    def __init__(
        self,
        target: Target,
        *,
        head_path: str,
        depth: int = 6,
        top_k: int = 10,
        nodes: int = 60,
        share_noise: bool = False,
    ) -> None:
        for key, value in (("depth", depth), ("top_k", top_k), ("nodes", nodes)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"eagle2: {key}={value}: must be a whole number, at least 1")
        if top_k > target.vocab_size:
            raise UserError(f"eagle2: top_k={top_k}: there are only {target.vocab_size} tokens")
        self.depth, self.top_k, self.shares_noise = depth, top_k, share_noise
        self.nodes = min(nodes, top_k + (depth - 1) * top_k**2)
        inner = (depth - 1) * top_k
        super().__init__(target, head_path, inner=inner, max_nodes=1 + self.nodes, max_depth=min(depth, self.nodes))
        self.itself = torch.eye(top_k, dtype=torch.bool, device=self.device)
        self.tree_mask = self.mask_of(torch.zeros(top_k, inner, dtype=torch.bool, device=self.device))
        self.children = torch.arange(top_k, device=self.device)

    def session(self) -> Eagle2Session:
        return Eagle2Session(self)


class Eagle2Session(EagleSession):
    """Grows the tree by the head's confidence."""

    method: Eagle2

    def expand(self, root: int, feature: torch.Tensor) -> Draft:
        own, k = self.method, self.method.top_k
        best = self._log_probabilities(feature, 0).topk(k, dim=-1)
        value, token = best.values.view(-1), best.indices.view(-1)  # of the nodes to expand: (k,)
        whose, node = torch.zeros_like(own.children), own.children  # row of the parent's feature; number
        values, tokens, parents = [value], [token], [whose - 1]  # of all nodes seen; -1 is the root
        visible = own.itself  # (k, expanded so far)
        features, seen = feature, k
        for depth in range(1, own.depth):
            mask = self._show(visible)
            features = self.continue_nodes(features.index_select(0, whose), token, depth, mask)  # (k, H)
            best = self._log_probabilities(features, depth).topk(k, dim=-1)
            below = (value[:, None] + best.values).view(-1)  # (k * k,)
            values.append(below)
            tokens.append(best.indices.view(-1))
            parents.append(node.repeat_interleave(k))
            value, flat = below.topk(k)
            token, whose, node = tokens[-1].index_select(0, flat), flat // k, flat + seen
            visible = torch.cat((visible.index_select(0, whose), own.itself), dim=1)
            seen += k * k
        # A child is never worth more than its parent and stands behind it, so a stable order keeps parents.
        kept = torch.cat(values).sort(descending=True, stable=True).indices[: own.nodes]
        found = torch.stack((kept, torch.cat(parents)[kept], torch.cat(tokens)[kept]))
        return self._breadth_first(root, *found.tolist())  # one transfer

    def _log_probabilities(self, features: torch.Tensor, depth: int) -> torch.Tensor:
        return torch.log_softmax(self.head_scores(features, depth).float(), dim=-1)  # (w, V)

    def _show(self, visible: torch.Tensor) -> torch.Tensor:
        """Write the topology into the mask."""
        own = self.method
        part = own.tree_mask[:, own.capacity : own.capacity + visible.shape[1]]
        part.zero_().masked_fill_(~visible, own.blocked)
        return own.tree_mask

    def _breadth_first(self, root: int, kept: list[int], parents: list[int], tokens: list[int]) -> Draft:
        """The draft of the nodes kept: their numbers, their parents' numbers (-1: the root), their tokens."""
        children: dict[int, list[int]] = {}
        for number, parent in sorted(zip(kept, parents, strict=True)):
            children.setdefault(parent, []).append(number)
        order, tree_parents = [-1], [0]
        for i, number in enumerate(order):  # grows while it is walked
            below = children.get(number, [])
            order += below
            tree_parents += [i] * len(below)
        token = dict(zip(kept, tokens, strict=True)) | {-1: root}
        ranks = [0] + [
            number % self.method.top_k for number in order[1:]
        ]  # numbers of siblings start at a multiple of top_k
        tree = Tree(tree_parents, ranks, self.method.device, once=True)
        return Draft(tree, torch.tensor([token[number] for number in order], device=self.method.device))
