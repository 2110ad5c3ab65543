"""What drafters share that continue the target's features by a head with a cache of its own (EAGLE, EAGLE-2)."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ..decoding import Draft, Drafter, Session, Target, Verification
from ..decoding.cache import CachePool
from .eagle_head import load_head


class EagleDrafter(Drafter):
    """The head, its caches and its masks; a method says which tree its sequences grow.

    Args:
        target: whose features, embedding and head they are.
        head_path: folder of the head, see `eagle_head.load_head`.
        inner: drafted nodes that are continued in one draft.
        max_nodes: of a draft, root included.
        max_depth: of a draft.

    Raises:
        UserError: what `load_head` raises.
    """

    needs_hidden = True

    def __init__(self, target: Target, head_path: str, *, inner: int, max_nodes: int, max_depth: int) -> None:
        super().__init__(target.device)
        self.max_nodes = max_nodes
        self.head, self.lm_head = load_head(head_path, target), target.model.get_output_embeddings()
        target.equip(self.head)
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
    tokens are computed from the target's own features, as in the public code. Nothing is carried to the next prompt.
    """

    method: EagleDrafter

    def __init__(self, method: EagleDrafter) -> None:
        super().__init__(method)
        self._held = ExitStack()
        self._committed = 0  # pairs in the cache, drafted nodes not counted
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # features (m, H), tokens (m,), not yet in the cache

    def begin(self, prompt: list[int]) -> Draft:
        self.cache = self._held.enter_context(self.method.caches.borrowed(self.method.capacity))
        return self.method.root_alone(prompt[-1])

    def close(self) -> None:
        self._held.close()

    def observe_prompt_hidden(self, prompt: list[int], hidden: torch.Tensor) -> None:
        self._pairs.append((hidden[:-1], torch.tensor(prompt[1:], dtype=torch.long, device=hidden.device)))

    def observe(self, verification: Verification) -> None:
        tree, node = verification.draft.tree, verification.node
        path = tree.paths[node, : tree.depth_of[node] + 1]
        assert verification.hidden is not None
        chosen = verification.choices.index_select(0, path)  # the token behind each accepted node
        self._pairs.append((verification.hidden.index_select(0, path), chosen))

    def draft(self, root: int) -> Draft:
        draft = self.expand(root, self.catch_up())
        self.cache.length = self._committed
        return draft

    def expand(self, root: int, feature: torch.Tensor) -> Draft:
        """The draft below `root`, where the head predicts `feature` (1, H)."""
        raise NotImplementedError

    def catch_up(self) -> torch.Tensor:
        """Take the new pairs into the head's cache. Returns the feature predicted at the last one, (1, H)."""
        features, tokens = (
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*self._pairs, strict=True)
        )
        self._pairs = []
        past, new = self.cache.length, len(tokens)
        mask = None
        if past and new > 1:
            mask = self._part(self.method.catching_up[:new], past, new)
        angles = self.method.cos[:, past : past + new], self.method.sin[:, past : past + new]
        out = self.method.head(features[None], tokens[None], angles, mask, self.cache)[0]  # (m, H)
        self.cache.commit(new)
        self._committed = self.cache.length
        return out[-1:]  # type: ignore[no-any-return]

    def head_scores(self, features: torch.Tensor, depth: int) -> torch.Tensor:
        """What the target's head makes of features predicted at nodes of one depth: (w, V); see `Session.scores`."""
        length = self._committed + 1  # of the text, root included: a pair ends at each token but the first
        return self.scores(self.method.lm_head(features), length + depth)

    def continue_nodes(
        self, features: torch.Tensor, tokens: torch.Tensor, depth: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """Features predicted at w nodes of one depth: (w, H). They stay in the cache until the draft is done.

        Args:
            features: (w, H), predicted at the nodes' parents.
            tokens: int64 (w,), theirs.
            mask: which of the drafted nodes each attends to, as `mask_of` made it.
        """
        width, position = len(tokens), self._committed - 1 + depth
        mask = self._part(mask, self._committed, self.cache.length - self._committed + width)
        angles = self.method.cos[:, position : position + 1], self.method.sin[:, position : position + 1]
        out: torch.Tensor = self.method.head(features[None], tokens[None], angles, mask, self.cache)[0]
        self.cache.length += width
        return out

    def _part(self, mask: torch.Tensor, past: int, nodes: int) -> torch.Tensor:
        """The part of a mask for `past` committed pairs and `nodes` behind them: (1, 1, w, past + nodes)."""
        capacity = self.method.capacity
        mask = mask[:, capacity - past : capacity + nodes][None, None]
        return mask.contiguous() if mask.is_cuda else mask  # CUDA's kernels want aligned rows
