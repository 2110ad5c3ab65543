"""A forward over a draft whose place in the cache, and whose tree, are known to the device only."""

from __future__ import annotations

import weakref

import torch

from .attention import WORD, TreeAttention, packed
from .cache import TreeCache
from .target import Target
from .tree import Tree


class StaticForward:
    """Forwards drafts of up to n nodes over one bucket of the cache, with the same shapes every time.

    So it can be compiled, or captured and replayed. Nodes that a smaller tree leaves over see the committed tokens and
    themselves alone, and nobody sees them.

    Args:
        cache: not kept alive: a larger one may take its place.
        length: int64 (), the committed tokens; the caller's to fill.
        bucket: positions of the cache that can be seen; at least length + n.
        compiled: the model as `compiling` has it compiled.
    """

    def __init__(
        self, target: Target, cache: TreeCache, nodes: int, bucket: int, length: torch.Tensor, *, compiled: bool
    ) -> None:
        self.target, self.bucket, self.compiled, self._cache = target, bucket, compiled, weakref.ref(cache)
        device = target.device
        self.length = length
        self.depths = torch.zeros(nodes, dtype=torch.long, device=device)
        self._nodes = torch.arange(nodes, device=device)
        self._columns = torch.arange(bucket, device=device)
        self._word, self._bit = self._nodes // WORD, self._nodes % WORD  # of a node in a row of packed ancestors
        self._attention = _tree_attention(target, nodes, bucket, self.length)
        if self._attention is not None:
            return
        self._blocked = torch.finfo(target.dtype).min
        # (n, n + 2): the tree's own mask between a column that all attend to and one that none does
        self._mask = torch.full((nodes, nodes + 2), self._blocked, dtype=target.dtype, device=device)
        self._mask[:, 0] = 0

    def set_tree(self, tree: Tree) -> None:
        """Forward this tree of m nodes, m <= n, from now on."""
        depths = torch.zeros(len(self._nodes), dtype=torch.long)
        depths[: len(tree)] = torch.tensor(tree.depth_of)
        words = packed(tree.host_ancestors, len(depths))
        self.take(depths.to(self.depths.device), words.to(self.depths.device))

    def take(self, depths: torch.Tensor, words: torch.Tensor) -> None:
        """A tree on the device, which no host value is read for: int64 (n,), and (n, ceil(n / 64)) as `packed` has it.

        Nodes that it leaves over have depth 0 and see themselves.
        """
        self.depths.copy_(depths)
        seen = (words.index_select(1, self._word) >> self._bit & 1).bool()  # (n, n)
        if self._attention is None:
            self._mask[:, 1:-1].fill_(self._blocked).masked_fill_(seen, 0)
        else:
            self._attention.take(words, seen)

    @property
    def positions(self) -> torch.Tensor:
        """Of the token that follows each node: int64 (n,)."""
        return self.depths + self.length + 1

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids (n,) -> logits (n, V). No host value is read and nothing of another shape is made."""
        cache, mask = self._cache(), None
        assert cache is not None
        if self._attention is None:
            # committed columns show node -1, the tree's columns its nodes, those behind them node n
            node = (self._columns - self.length + 1).clamp(0, len(self._nodes) + 1)  # (bucket,)
            mask = self._mask.index_select(1, node)  # (n, bucket)
        return self.target.forward_static(
            cache,
            tokens,
            self.depths + self.length,
            self._nodes + self.length,
            self.bucket,
            mask=mask,
            attention=self._attention,
            compiled=self.compiled,
        )


def _tree_attention(target: Target, nodes: int, bucket: int, length: torch.Tensor) -> TreeAttention | None:
    """What a target's static steps of so many nodes attend by; None where it is sdpa with a mask."""
    if target.switch is None:
        return None
    layer, heads = target.layer, target.model.config.get_text_config().num_attention_heads
    heads //= getattr(target.model, "tp_size", None) or 1  # of processes that share the model each has its part of them
    return TreeAttention(heads, layer.heads, layer.key_dim, nodes, bucket, length, layer.dtype)
