"""EAGLE and EAGLE-2: features are drafted one after the other and tokens follow from them.

`Eagle` drafts a static tree (arXiv 2401.15077), `Eagle2` one that follows the head's own confidence (arXiv 2406.16858).
Verification is the engine's. Source of the tree and the order of things: github.com/SafeAILab/EAGLE, whose 60 nodes of
EAGLE-2 include the root; here `nodes` leave it out.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ..engine import Draft, Drafter, Needs, Session, Target, Tree, Verification
from ..engine.cache import CachePool
from ..engine.tree import breadth_first
from ..structures import check_whole
from ..structures.heads import load_head, template


class EagleDrafter(Drafter):
    """The head, its caches and its masks; a subclass says which tree its sequences grow.

    Args:
        head_path: folder of the head, see `heads.load_head`.
        inner: drafted nodes that are continued in one draft.
        max_nodes, max_depth: of a draft, root included.
    """

    needs = Needs(hidden=True)

    def __init__(self, target: Target, head_path: str, *, inner: int, max_nodes: int, max_depth: int) -> None:
        super().__init__(target.device, target.vocab_size)
        self.max_nodes = max_nodes
        self.head, self.lm_head = load_head(head_path, target), target.model.get_output_embeddings()
        target.prepare(self.head)
        self.capacity = target.context + max(inner, max_depth) + 1
        self.caches = CachePool(self.head.new_cache)
        self.blocked = torch.finfo(target.dtype).min
        self.cos, self.sin = self.head.angles(self.capacity)
        above = torch.ones(max_depth + 1, max_depth + 1, dtype=torch.bool, device=self.device).triu_(1)
        self.catching_up = self.mask_of(~above)

    def mask_of(self, visible: torch.Tensor) -> torch.Tensor:
        """Additive mask (w, capacity + m): zeros for what is committed, then which of m drafted nodes each sees."""
        zeros = torch.zeros(visible.shape[0], self.capacity, dtype=self.head.fc.weight.dtype, device=self.device)
        return torch.cat((zeros, torch.zeros_like(visible, dtype=zeros.dtype).masked_fill_(~visible, self.blocked)), 1)


class EagleSession(Session):
    """Keeps the head's cache in step with the target's accepted tokens.

    Pair t is (feature of token t, token t + 1); the head's output at the last pair, whose token is the root, is the
    feature predicted at the root. Keys and values of drafted nodes are dropped after each draft and those of accepted
    tokens are computed from the target's own features, as in the public code. Nothing is kept between prompts.
    """

    drafter: EagleDrafter

    def __init__(self, drafter: EagleDrafter) -> None:
        super().__init__(drafter)
        self._borrowed = ExitStack()
        self._committed = 0  # pairs in the cache, drafted nodes not counted
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # features (m, H), tokens (m,), not yet in the cache

    def begin(self, prompt: list[int]) -> Draft:
        self.cache = self._borrowed.enter_context(self.drafter.caches.borrowed(self.drafter.capacity))
        return self.drafter.root_alone(prompt[-1])

    def close(self) -> None:
        self._borrowed.close()

    def observe_prompt_hidden(self, prompt: list[int], hidden: torch.Tensor) -> None:
        self._pairs.append((hidden[:-1], torch.tensor(prompt[1:], dtype=torch.long, device=hidden.device)))

    def observe(self, verification: Verification) -> None:
        tree, node = verification.draft.tree, verification.node
        path = tree.paths[node, : tree.depth_of[node] + 1]
        assert verification.hidden is not None
        chosen = verification.choices.index_select(0, path)  # the token after each accepted node
        self._pairs.append((verification.hidden.index_select(0, path), chosen))

    def draft(self, root: int) -> Draft:
        draft = self.expand(root, self.catch_up())
        self.cache.length = self._committed
        return draft

    def expand(self, root: int, feature: torch.Tensor) -> Draft:
        """Grow the draft below `root`, at which the head predicts `feature` (1, H)."""
        raise NotImplementedError

    def catch_up(self) -> torch.Tensor:
        """Forward the new pairs into the head's cache. Returns the feature predicted at the last one, (1, H)."""
        features, tokens = (torch.cat(tensors) for tensors in zip(*self._pairs, strict=True))
        self._pairs = []
        past, new = self.cache.length, len(tokens)
        mask = self._part(self.drafter.catching_up[:new], past, new) if past and new > 1 else None
        angles = self.drafter.cos[:, past : past + new], self.drafter.sin[:, past : past + new]
        out = self.drafter.head(features[None], tokens[None], angles, mask, self.cache)[0]  # (m, H)
        self.cache.commit(new)
        self._committed = self.cache.length
        return out[-1:]  # type: ignore[no-any-return]

    def continue_nodes(
        self, features: torch.Tensor, tokens: torch.Tensor, depth: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """Features predicted at w nodes of one depth: (w, H). They stay in the cache until the draft is done.

        Args:
            features: (w, H), predicted at the nodes' parents.
            tokens: int64 (w,), of the nodes.
            mask: which of the drafted nodes each attends to, as `mask_of` made it.
        """
        width, position = len(tokens), self._committed - 1 + depth
        mask = self._part(mask, self._committed, self.cache.length - self._committed + width)
        angles = self.drafter.cos[:, position : position + 1], self.drafter.sin[:, position : position + 1]
        out: torch.Tensor = self.drafter.head(features[None], tokens[None], angles, mask, self.cache)[0]
        self.cache.length += width
        return out

    def _part(self, mask: torch.Tensor, past: int, nodes: int) -> torch.Tensor:
        """The part of a mask for `past` committed pairs and `nodes` after them: (1, 1, w, past + nodes)."""
        capacity = self.drafter.capacity
        mask = mask[:, capacity - past : capacity + nodes][None, None]
        return mask.contiguous() if mask.is_cuda else mask  # CUDA's kernels want aligned rows


@dataclass(frozen=True, slots=True)
class Level:
    """How one depth of a static tree is continued: its w nodes that have children."""

    nodes: torch.Tensor  # int64 (w,): which of this depth's nodes they are
    parents: torch.Tensor  # int64 (w,): whose feature each continues, among the nodes continued one depth above
    visible: torch.Tensor  # bool (w, m): which of the m nodes continued so far each is or descends from
    candidates: int  # tokens wanted of each
    pick: torch.Tensor  # int64 (children,): where the next depth's nodes find their tokens among (w * candidates)


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
        tree_path: YAML of rank paths; default: the published 25 nodes.
    """

    def __init__(self, target: Target, *, head_path: str, tree_path: str | None = None) -> None:
        tree = template("eagle-25", tree_path, target.logits_size).on(target.device)
        levels = plan(tree)
        inner = sum(len(level.nodes) for level in levels[1:])
        super().__init__(target, head_path, inner=inner, max_nodes=len(tree), max_depth=tree.max_depth)
        self.template = tree
        self.levels = [(level, self.mask_of(level.visible)) for level in levels]

    def session(self) -> EagleTreeSession:
        return EagleTreeSession(self)


class EagleTreeSession(EagleSession):
    drafter: Eagle

    def expand(self, root: int, feature: torch.Tensor) -> Draft:
        features, tokens = feature, torch.tensor([root], device=feature.device)
        drafted = [tokens]
        for depth, (level, mask) in enumerate(self.drafter.levels):
            if depth:
                continued = tokens.index_select(0, level.nodes)
                features = self.continue_nodes(features.index_select(0, level.parents), continued, depth, mask)
            candidates = self.drafter.lm_head(features).topk(level.candidates, dim=-1).indices  # (w, candidates)
            tokens = candidates.view(-1).index_select(0, level.pick)
            drafted.append(tokens)
        return Draft(self.drafter.template, torch.cat(drafted))


class Eagle2(EagleDrafter):
    """Expands the best `top_k` nodes of each depth (4.1), then keeps the best `nodes` of all that were seen (4.2).

    A node's value is the product of the head's probabilities along its path, which estimate acceptance rates.

    Args:
        depth: of the deepest node.
        top_k: nodes expanded a depth, and children of each.
        nodes: drafted nodes kept, root not counted.
    """

    def __init__(self, target: Target, *, head_path: str, depth: int = 6, top_k: int = 10, nodes: int = 60) -> None:
        check_whole("eagle2", 1, depth=depth, nodes=nodes)
        check_whole("eagle2", 1, target.logits_size, top_k=top_k)
        self.depth, self.top_k = depth, top_k
        self.nodes = min(nodes, top_k + (depth - 1) * top_k**2)
        inner = (depth - 1) * top_k
        super().__init__(target, head_path, inner=inner, max_nodes=1 + self.nodes, max_depth=min(depth, self.nodes))
        self.itself = torch.eye(top_k, dtype=torch.bool, device=self.device)
        self.tree_mask = self.mask_of(torch.zeros(top_k, inner, dtype=torch.bool, device=self.device))
        self.children = torch.arange(top_k, device=self.device)

    def session(self) -> Eagle2Session:
        return Eagle2Session(self)


class Eagle2Session(EagleSession):
    drafter: Eagle2

    def expand(self, root: int, feature: torch.Tensor) -> Draft:
        drafter, k = self.drafter, self.drafter.top_k
        best = self._log_probabilities(feature).topk(k, dim=-1)
        value, token = best.values.view(-1), best.indices.view(-1)  # of the nodes to expand: (k,)
        whose, node = torch.zeros_like(drafter.children), drafter.children  # row of the parent's feature; number
        values, tokens, parents = [value], [token], [whose - 1]  # of all nodes listed; -1 is the root
        visible = drafter.itself  # (k, expanded so far)
        features, listed = feature, k  # number of nodes listed so far
        for depth in range(1, drafter.depth):
            shown = drafter.tree_mask[:, drafter.capacity : drafter.capacity + visible.shape[1]]
            shown.zero_().masked_fill_(~visible, drafter.blocked)
            features = self.continue_nodes(features.index_select(0, whose), token, depth, drafter.tree_mask)  # (k, H)
            best = self._log_probabilities(features).topk(k, dim=-1)
            below = (value[:, None] + best.values).view(-1)  # (k * k,)
            values.append(below)
            tokens.append(best.indices.view(-1))
            parents.append(node.repeat_interleave(k))
            value, flat = below.topk(k)
            token, whose, node = tokens[-1].index_select(0, flat), flat // k, flat + listed
            visible = torch.cat((visible.index_select(0, whose), drafter.itself), dim=1)
            listed += k * k
        # A child's value is at most its parent's, and it comes later, so a stable sort keeps parents.
        best_nodes = torch.cat(values).sort(descending=True, stable=True).indices[: drafter.nodes]
        nodes = torch.stack((best_nodes, torch.cat(parents)[best_nodes], torch.cat(tokens)[best_nodes]))
        return self._breadth_first(root, *nodes.tolist())  # one transfer

    def _log_probabilities(self, features: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.drafter.lm_head(features).float(), dim=-1)  # (w, V)

    def _breadth_first(self, root: int, kept: list[int], parents: list[int], tokens: list[int]) -> Draft:
        """The draft of the nodes kept: their numbers, their parents' numbers (-1: the root), their tokens."""
        device, nodes = self.drafter.device, [(-1, -1, root), *sorted(zip(kept, parents, tokens, strict=True))]
        index = {number: i for i, (number, _, _) in enumerate(nodes)}
        order, tree_parents = breadth_first([index[parent] for _, parent, _ in nodes])
        # numbers of siblings start at a multiple of top_k
        ranks = [0] + [nodes[i][0] % self.drafter.top_k for i in order[1:]]
        tree = Tree(tree_parents, ranks, device, once=True)
        return Draft(tree, torch.tensor([nodes[i][2] for i in order], device=device))
