"""EAGLE: features are drafted one after the other and tokens follow from them; static tree (arXiv 2401.15077).

Verification is the engine's. Source of the tree and the order of things: github.com/SafeAILab/EAGLE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..decoding import Draft, Target, Tree
from ..errors import UserError
from .eagle_drafter import EagleDrafter, EagleSession
from .head_files import template


@dataclass(frozen=True, slots=True)
class Level:
    """How one depth of a static tree is continued: its w nodes that have children.

    Attributes:
        nodes: int64 (w,); which of this depth's nodes they are.
        parents: int64 (w,); whose feature each continues, among the nodes continued one depth above.
        visible: bool (w, m); which of the m nodes continued so far each is or descends from.
        candidates: tokens wanted of each.
        pick: int64 (children,); where the next depth's nodes find their tokens among the (w * candidates).
    """

    nodes: torch.Tensor
    parents: torch.Tensor
    visible: torch.Tensor
    candidates: int
    pick: torch.Tensor


def plan(tree: Tree) -> list[Level]:
    """The levels of a static tree, root first, the deepest leaves left out. Tensors are on the tree's device."""
    parents, ranks = tree.parents.tolist(), tree.ranks.tolist()
    levels: list[Level] = []
    continued: list[int] = []  # below the root
    above: list[int] = [0]
    for (first, end), (below, below_end) in zip(tree.levels, tree.levels[1:], strict=False):
        inner = [i for i in range(first, end) if i in set(parents[below:below_end])]
        continued += inner if first else []
        candidates = 1 + max(ranks[below:below_end])
        row = {node: i for i, node in enumerate(inner)}
        rows = [
            [node - first for node in inner],
            [above.index(parents[node]) for node in inner],
            [row[parents[child]] * candidates + ranks[child] for child in range(below, below_end)],
        ]
        nodes, whose, pick = (torch.tensor(values, dtype=torch.long, device=tree.device) for values in rows)
        visible = tree.ancestors[inner][:, continued]
        levels.append(Level(nodes, whose, visible, candidates, pick))
        above = inner
    return levels


class Eagle(EagleDrafter):
    """Drafts a tree of fixed shape: a node's children are the best tokens of the feature predicted at it.

    Args:
        target, head_path: see `EagleDrafter`.
        tree_path: YAML of rank paths; default: the published 25 nodes.
        share_noise: where tokens are drawn, children are drawn, too, by the target's own noise; else the best ones.

    Raises:
        UserError: what `load_head` raises; a tree of more ranks than tokens.
    """

    def __init__(
        self, target: Target, *, head_path: str, tree_path: str | None = None, share_noise: bool = False
    ) -> None:
        tree = template("eagle-25", tree_path).on(target.device)
        if tree.max_rank >= target.vocab_size:
            raise UserError(f"eagle: the tree's rank {tree.max_rank} is beyond the {target.vocab_size} tokens")
        levels = plan(tree)
        inner = sum(len(level.nodes) for level in levels[1:])
        super().__init__(target, head_path, inner=inner, max_nodes=len(tree), max_depth=tree.max_depth)
        self.template, self.shares_noise = tree, share_noise
        self.levels = [(level, self.mask_of(level.visible)) for level in levels]

    def session(self) -> EagleTreeSession:
        return EagleTreeSession(self)


class EagleTreeSession(EagleSession):
    """Grows the tree level by level."""

    method: Eagle

    def expand(self, root: int, feature: torch.Tensor) -> Draft:
        features, tokens = feature, torch.tensor([root], device=feature.device)
        drafted = [tokens]
        for depth, (level, mask) in enumerate(self.method.levels):
            if depth:
                continued = tokens.index_select(0, level.nodes)
                features = self.continue_nodes(features.index_select(0, level.parents), continued, depth, mask)
            candidates = self.head_scores(features, depth).topk(level.candidates, dim=-1).indices  # (w, candidates)
            tokens = candidates.view(-1).index_select(0, level.pick)
            drafted.append(tokens)
        return Draft(self.method.template, torch.cat(drafted))
