"""EAGLE, EAGLE-2 and EAGLE-3: features are drafted one after the other and tokens follow from them.

`Eagle` drafts a static tree (arXiv 2401.15077), `Eagle2` one that follows the head's own confidence
(arXiv 2406.16858), `Eagle3` the same with a head trained on its own drafts (arXiv 2503.01840).
Verification is the engine's. The tree and the order of operations are those of
github.com/SafeAILab/EAGLE, whose 60 nodes include the root; `nodes` here do not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..engine import Draft, Target, Tree
from ..engine.tree import breadth_first
from ..structures import check_whole
from ..structures.head_drafter import HeadDrafter, HeadSession, StaticTree, StaticTreeSession
from ..structures.heads import Eagle3Head, Head, load_eagle3_head, load_head, template


class Eagle(StaticTree):
    """Drafts a tree of fixed shape.

    A node's children are the best tokens of the feature predicted at it.

    Args:
        tree_path: YAML of rank paths; default: the published 25 nodes.
    """

    def __init__(self, target: Target, *, head_path: str, tree_path: str | None = None) -> None:
        super().__init__(
            target,
            load_head(head_path, target),
            template("eagle-25", tree_path, target.logits_size),
        )
        self.lm_head = target.model.get_output_embeddings()

    def session(self) -> EagleSession:
        return EagleSession(self)


class EagleSession(StaticTreeSession):
    drafter: Eagle

    def after(
        self, depth: int, state: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        visible = self.drafter.levels[depth].visible
        features = self.continue_nodes(state, tokens, depth, visible) if depth else state
        return features, self.drafter.lm_head(features)


class ConfidenceTree(HeadDrafter):
    """Expands the best `top_k` nodes of each depth (2406.16858, 4.1).

    Then keeps the best `nodes` of all seen (4.2).

    A node's value is the product of the head's probabilities along its path, which estimate
    acceptance rates.

    Args:
        lm_head: features (m, H) -> logits (m, W).
        ids: int64 (W,), the target's ids of these logits; None: they are the target's own.
        depth: of the deepest node, one more than the public code's, which counts the passes after
            the first.
        top_k: nodes expanded a depth, and children of each.
        nodes: drafted nodes kept, root not counted.
    """

    def __init__(
        self,
        target: Target,
        head: Head,
        lm_head: nn.Module,
        ids: torch.Tensor | None = None,
        *,
        depth: int,
        top_k: int,
        nodes: int,
    ) -> None:
        name = type(self).__name__.lower()
        check_whole(name, 1, depth=depth, nodes=nodes)
        check_whole(name, 1, target.logits_size if ids is None else len(ids), top_k=top_k)
        self.lm_head = lm_head
        self.ids = ids
        self.depth = depth
        self.top_k = top_k
        self.nodes = min(nodes, top_k + (depth - 1) * top_k**2)
        inner = (depth - 1) * top_k
        super().__init__(target, head, inner=inner, max_nodes=1 + self.nodes)
        self.itself = torch.eye(top_k, dtype=torch.bool, device=self.device)
        self.children = torch.arange(top_k, device=self.device)

    def session(self) -> ConfidenceTreeSession:
        return ConfidenceTreeSession(self)


class Eagle2(ConfidenceTree):
    """EAGLE's head; the target's own head gives the tokens. Settings as `ConfidenceTree`."""

    def __init__(
        self, target: Target, *, head_path: str, depth: int = 6, top_k: int = 10, nodes: int = 60
    ) -> None:
        head = load_head(head_path, target)
        lm_head = target.model.get_output_embeddings()
        super().__init__(target, head, lm_head, depth=depth, top_k=top_k, nodes=nodes)


class Eagle3(ConfidenceTree):
    """EAGLE-3's head, which gives the tokens itself.

    Spec-Bench runs it with depth 6, which its code calls 5.

    Args:
        layers: numbers of the hidden states that the head reads, in place of those in its
            config.json: 0 is the embedding's output, i enters layer i (from 0).
        others: as `ConfidenceTree`.
    """

    head: Eagle3Head

    def __init__(
        self,
        target: Target,
        *,
        eagle3_path: str,
        layers: list[int] | None = None,
        depth: int = 8,
        top_k: int = 10,
        nodes: int = 59,
    ) -> None:
        head = load_eagle3_head(eagle3_path, target, layers)
        norm = nn.Identity() if "norm_output" in head.asked else head.norm
        lm_head = nn.Sequential(norm, head.lm_head or target.model.get_output_embeddings())
        super().__init__(target, head, lm_head, head.ids, depth=depth, top_k=top_k, nodes=nodes)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"hidden_states": f"{self.head.reads} ({self.head.source})"}


class ConfidenceTreeSession(HeadSession):
    drafter: ConfidenceTree

    def expand(self, root: int, feature: torch.Tensor) -> Draft:
        drafter = self.drafter
        k = self.drafter.top_k
        # of the nodes to expand: (k,)
        value, token = (best.view(-1) for best in self._best(feature))
        # their parents' feature rows; their numbers
        whose = torch.zeros_like(drafter.children)
        node = drafter.children
        # of all nodes listed; -1 is the root
        values = [value]
        tokens = [token]
        parents = [whose - 1]
        visible = drafter.itself  # (k, expanded so far)
        # number of nodes listed so far
        features = feature
        listed = k
        for depth in range(1, drafter.depth):
            # (k, H)
            features = self.continue_nodes(features.index_select(0, whose), token, depth, visible)
            log_probs, best = self._best(features)
            below = (value[:, None] + log_probs).view(-1)  # (k * k,)
            values.append(below)
            tokens.append(best.view(-1))
            parents.append(node.repeat_interleave(k))
            value, flat = below.topk(k)
            token = tokens[-1].index_select(0, flat)
            whose = flat // k
            node = flat + listed
            visible = torch.cat((visible.index_select(0, whose), drafter.itself), dim=1)
            listed += k * k

        # A child's value is at most its parent's, and it comes later, so a stable sort puts every
        # parent first.
        best_nodes = torch.cat(values).sort(descending=True, stable=True).indices[: drafter.nodes]
        nodes = torch.stack(
            (best_nodes, torch.cat(parents)[best_nodes], torch.cat(tokens)[best_nodes])
        )
        return self._breadth_first(root, *nodes.tolist())  # one transfer

    def _best(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and tokens of the children of nodes with features (w, H).

        Both are (w, top_k), best first.
        """
        drafter = self.drafter
        best = torch.log_softmax(drafter.lm_head(features).float(), dim=-1).topk(
            drafter.top_k, dim=-1
        )
        # a sort puts NaN first, before its parent
        values = best.values.nan_to_num(nan=-math.inf, neginf=-math.inf)
        return values, best.indices if drafter.ids is None else drafter.ids[best.indices]

    def _breadth_first(
        self, root: int, kept: list[int], parents: list[int], tokens: list[int]
    ) -> Draft:
        """Return the draft of the kept nodes.

        They are given by numbers, parents' numbers (-1: the root) and tokens.
        """
        device = self.drafter.device
        nodes = [(-1, -1, root), *sorted(zip(kept, parents, tokens, strict=True))]
        index = {number: i for i, (number, _, _) in enumerate(nodes)}
        order, tree_parents = breadth_first([index[parent] for _, parent, _ in nodes])
        # numbers of siblings start at a multiple of top_k
        ranks = [0] + [nodes[i][0] % self.drafter.top_k for i in order[1:]]
        tree = Tree(tree_parents, ranks, device)
        return Draft(tree, torch.tensor([nodes[i][2] for i in order], device=device))
