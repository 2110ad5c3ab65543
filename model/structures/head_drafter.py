"""Draft with a head that has a cache of its own, and grow a static tree level by level."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ..engine import Draft, Drafter, Needs, Session, Target, Tree, Verification
from ..engine.cache import CachePool
from ..engine.sight import additive
from .heads import Head


class HeadDrafter(Drafter):
    """The head and its caches; a subclass says which tree its sequences grow.

    Args:
        inner: number of a draft's nodes that the head continues.
        max_nodes: maximum nodes of a draft, root included.
    """

    def __init__(self, target: Target, head: Head, *, inner: int, max_nodes: int) -> None:
        super().__init__(target.device, target.vocab_size)
        self.head = head
        self.max_nodes = max_nodes
        self.needs = Needs(hidden=head.reads)
        target.prepare(head)
        self.capacity = target.context + inner + 1
        self.caches = CachePool(head.new_cache)
        self.dtype = target.dtype
        self.cos, self.sin = head.angles(self.capacity)


class HeadSession(Session):
    """Keeps the head's cache in step with the target's accepted tokens.

    Pair t is (hidden states of token t, token t + 1); the head's output at the last pair, whose
    token is the root, is the feature predicted at the root. Keys and values of drafted nodes are
    dropped after each draft and those of accepted tokens are computed from the target's own states,
    as in the public code. Nothing is kept between prompts.
    """

    drafter: HeadDrafter

    def __init__(self, drafter: HeadDrafter) -> None:
        super().__init__(drafter)
        self._borrowed = ExitStack()
        self._committed = 0  # pairs in the cache, drafted nodes not counted
        # states (m, w H), tokens (m,), not yet in the cache
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, prompt: list[int]) -> Draft:
        self.cache = self._borrowed.enter_context(
            self.drafter.caches.borrowed(self.drafter.capacity)
        )
        return self.drafter.root_alone(prompt[-1])

    def close(self) -> None:
        self._borrowed.close()

    def observe_prompt_hidden(self, prompt: list[int], hidden: torch.Tensor) -> None:
        self._pairs.append(
            (hidden[:-1], torch.tensor(prompt[1:], dtype=torch.long, device=hidden.device))
        )

    def observe(self, verification: Verification) -> None:
        tree = verification.draft.tree
        node = verification.node
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
        """Forward the new pairs into the head's cache.

        Returns the feature predicted at the last one, (1, H).
        """
        drafter = self.drafter
        hidden, tokens = (torch.cat(tensors) for tensors in zip(*self._pairs, strict=True))
        self._pairs = []
        past = self.cache.length
        new = len(tokens)
        mask = None
        if past and new > 1:
            earlier = torch.ones(new, new, dtype=torch.bool, device=drafter.device).tril_()
            mask = additive(earlier, drafter.dtype, past)[None, None]

        features = drafter.head.features(hidden)
        out = self._forward(features, tokens, slice(past, past + new), mask)
        self.cache.commit(new)
        self._committed = self.cache.length
        return out[-1:]

    def continue_nodes(
        self, features: torch.Tensor, tokens: torch.Tensor, depth: int, visible: torch.Tensor
    ) -> torch.Tensor:
        """Return the features predicted at w nodes of one depth: (w, H).

        The nodes stay cached until the draft is done.

        Args:
            features: (w, H), predicted at the nodes' parents.
            tokens: int64 (w,), of the nodes.
            visible: bool (w, m), which of the m nodes drafted so far, their own included, each
                attends to.
        """
        position = self._committed - 1 + depth
        # (1, 1, w, past + m)
        mask = additive(visible, self.drafter.dtype, self._committed)[None, None]
        out = self._forward(features, tokens, slice(position, position + 1), mask)
        self.cache.length += len(tokens)
        return out

    def _forward(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: slice,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the head over features (m, H) and tokens (m,). Returns its outputs, (m, H)."""
        drafter = self.drafter
        angles = drafter.cos[:, positions], drafter.sin[:, positions]
        out = drafter.head(features[None], tokens[None], angles, mask, self.cache)
        return out[0]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Level:
    """The w nodes of one depth of a static tree that have children."""

    nodes: torch.Tensor  # int64 (w,): their indices among this depth's nodes
    # int64 (w,): their parents' indices among the nodes continued one depth above
    parents: torch.Tensor
    # bool (w, m): which of the m nodes continued so far each is or descends from
    visible: torch.Tensor
    candidates: int  # number of candidates needed per node
    # int64 (children,): index of each child's token among the (w * candidates) candidates
    pick: torch.Tensor


def plan(tree: Tree) -> list[Level]:
    """Return the levels of a static tree, root first, without the deepest leaves.

    Tensors are on the tree's device.
    """
    parents = tree.parents.tolist()
    ranks = tree.ranks.tolist()
    levels: list[Level] = []
    continued: list[int] = []  # below the root
    above: list[int] = [0]

    for (first, _), (below, below_end) in zip(tree.levels, tree.levels[1:], strict=False):
        inner = sorted(set(parents[below:below_end]))
        if first:
            continued += inner
        candidates = 1 + max(ranks[below:below_end])
        row = {node: i for i, node in enumerate(inner)}

        rows = [
            [node - first for node in inner],
            [above.index(parents[node]) for node in inner],
            [row[parents[child]] * candidates + ranks[child] for child in range(below, below_end)],
        ]
        nodes, whose, pick = (
            torch.tensor(values, dtype=torch.long, device=tree.device) for values in rows
        )
        visible = tree.ancestors[inner][:, continued]
        levels.append(Level(nodes, whose, visible, candidates, pick))
        above = inner

    return levels


class StaticTree(HeadDrafter):
    """Drafts a tree of fixed shape."""

    def __init__(self, target: Target, head: Head, tree: Tree) -> None:
        self.template = tree.on(target.device)
        self.levels = plan(self.template)
        inner = sum(len(level.nodes) for level in self.levels[1:])
        super().__init__(target, head, inner=inner, max_nodes=len(tree))


class StaticTreeSession(HeadSession):
    drafter: StaticTree

    def expand(self, root: int, feature: torch.Tensor) -> Draft:
        drafted = [torch.tensor([root], device=feature.device)]
        state = feature
        for depth, level in enumerate(self.drafter.levels):
            tokens = drafted[-1].index_select(0, level.nodes)
            state, logits = self.after(depth, state.index_select(0, level.parents), tokens)
            candidates = logits.topk(level.candidates, dim=-1).indices  # (w, candidates)
            drafted.append(candidates.view(-1).index_select(0, level.pick))
        return Draft(self.drafter.template, torch.cat(drafted))

    def after(
        self, depth: int, state: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of w nodes and the logits (w, V) after them.

        The parents' states are (w, S), the tokens (w,).

        At depth 0, the root, `state` is the feature predicted at the root.
        """
        raise NotImplementedError
