"""Preallocated KV cache that commits an accepted path in place, and the masks by which draft trees attend to it.

Stock transformers caches cannot do this: DynamicCache reallocates by concatenation at every step, StaticCache keeps its
own counter and attends over its whole capacity. Here a forward writes its n draft nodes behind the committed tokens and
attends over the used part alone; `commit` moves the accepted nodes together; the rest is overwritten by the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .tree import Tree

MOST_MASKS = 64  # trees whose masks are kept
ALIGNED = 16  # numbers: CUDA's kernels take rows that begin at a multiple of this, and copy all others once more


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches for a token: heads, widths of key and value, type, device."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class Place:
    """Where the next forward writes; shared by a cache and its layers, which would be a cycle if they held the cache.

    Attributes:
        length: committed tokens.
        write_at: in static steps, int64 (n,): the positions, as the host does not know the length.
        bucket: in static steps, the positions that a step attends over; its mask hides unused ones.
    """

    length: int = 0
    write_at: torch.Tensor | None = None
    bucket: int = 0


class TreeCacheLayer(CacheLayerMixin):
    """A view of one layer in the cache's buffers; keys and values are (1, heads, capacity, dim)."""

    is_sliding = False
    is_compileable = False

    def __init__(self, place: Place, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.place, self.keys, self.values = place, keys, values
        self.is_initialized = True

    def lazy_initialization(self, *args: torch.Tensor) -> None:
        """Nothing is lazy here."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states (1, heads, n, dim) behind the committed tokens; return all that is in use.

        A drafted node may overflow float16. No mask silences infinite states (0 x inf is NaN), so other nodes and, in
        static steps, later ones would be lost with it: such states are written as zeros. Those of text that the model
        itself overflows on are, too; its own output is NaN from there on.
        """
        if key_states.dtype == torch.float16:
            key_states, value_states = _finite(key_states), _finite(value_states)
        at = self.place.write_at
        if at is not None:
            self.keys.index_copy_(2, at, key_states)
            self.values.index_copy_(2, at, value_states)
            return self.keys[:, :, : self.place.bucket], self.values[:, :, : self.place.bucket]
        start, end = self.place.length, self.place.length + key_states.shape[2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.place.length

    def get_max_length(self) -> int:
        return self.keys.shape[2] if self.keys is not None else 0

    get_max_cache_shape = get_max_length  # its name in transformers before 5.19


class TreeCache(Cache):
    """All layers, one allocation for each kind of layer (device, shape), made once and reused from prompt to prompt.

    Args:
        shapes: one entry a layer.
        capacity: tokens; must hold a prompt, its answer and one draft.
    """

    def __init__(self, shapes: Sequence[LayerShape], capacity: int) -> None:
        self.capacity, self.place = capacity, Place()
        self.text: list[int] = []  # token ids that the last sequence committed
        self.committed_by: tuple[Any, ...] = ()  # by which method and weights
        self._buffers: list[torch.Tensor] = []  # keys and values of each group: (layers, heads, capacity, dim)
        layers: list[CacheLayerMixin | None] = [None] * len(shapes)
        for shape in dict.fromkeys(shapes):
            members = [i for i, s in enumerate(shapes) if s == shape]
            keys, values = (
                torch.zeros((len(members), shape.heads, capacity, dim), dtype=shape.dtype, device=shape.device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            self._buffers += [keys, values]
            for row, i in enumerate(members):
                layers[i] = TreeCacheLayer(self.place, keys[row : row + 1], values[row : row + 1])
        super().__init__(layers=layers)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.place.length

    @length.setter
    def length(self, tokens: int) -> None:
        self.place.length = tokens

    def reset(self) -> None:
        """Forget all tokens; nothing is freed or zeroed, as nothing behind `length` is ever attended to."""
        self.length = 0
        self.text = []

    def keep(self, prompt: Sequence[int], committed_by: tuple[Any, ...] = ()) -> int:
        """Keep the committed beginning of this prompt, except its last token, and forget the rest.

        Args:
            committed_by: method and weights; what others committed is forgotten.

        Returns:
            How many tokens.
        """
        if self.committed_by != committed_by:
            self.reset()
        same = next((i for i, (a, b) in enumerate(zip(self.text, prompt, strict=False)) if a != b), len(self.text))
        self.length = min(same, len(prompt) - 1)
        self.text = self.text[: self.length]
        return self.length

    def commit(self, count: int, nodes: torch.Tensor | None = None) -> None:
        """Keep `count` of the tokens that the last forward wrote.

        Args:
            count: how many, the root included.
            nodes: int64 (count - 1,), the accepted nodes below the root in order; None if they are the first `count` (a
                prompt, a chain): nothing is moved.
        """
        if nodes is not None and count > 1:
            first = self.length + 1
            for buffer in self._buffers:
                source = (nodes + self.length).to(buffer.device, non_blocking=True)
                buffer[:, :, first : first + count - 1] = buffer.index_select(2, source)
        self.length += count

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy tokens from positions `source` (m,) to `target` (m,), all layers; the static form of `commit`."""
        for buffer in self._buffers:
            rows = buffer.index_select(2, source.to(buffer.device, non_blocking=True))
            buffer.index_copy_(2, target.to(buffer.device, non_blocking=True), rows)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(b.numel() * b.element_size() for b in self._buffers)


class CachePool:
    """Caches that sequences borrow: one for all in turn, one each for simultaneous ones.

    Threads may share it: each list operation is atomic, and nothing is assumed between two of them.

    Args:
        make: makes a cache of this capacity in tokens.
    """

    def __init__(self, make: Callable[[int], TreeCache]) -> None:
        self._make = make
        self._free: list[TreeCache] = []

    def reserve(self, capacity: int) -> None:
        """Allocate a cache of this capacity for the next sequence, unless there is one."""
        self._free.append(self._pop(capacity))

    @contextmanager
    def borrowed(
        self, capacity: int, prompt: Sequence[int] = (), committed_by: tuple[Any, ...] = ()
    ) -> Iterator[TreeCache]:
        """A cache with room for so many tokens, empty but for what the last sequence on it had of this prompt.

        Args:
            prompt, committed_by: see `TreeCache.keep`.
        """
        cache = self._pop(capacity)
        cache.keep(prompt, committed_by) if prompt else cache.reset()
        cache.committed_by = committed_by
        try:
            yield cache
        finally:
            self._free.append(cache)

    def _pop(self, capacity: int) -> TreeCache:
        """Take a cache of this capacity out of the pool: the one put back last, or a new one."""
        for cache in reversed(self._free.copy()):
            if cache.capacity >= capacity:
                try:
                    self._free.remove(cache)
                except ValueError:  # another thread took it meanwhile
                    continue
                return cache
        self._free.clear()  # before a larger one is allocated
        return self._make(capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches that are not borrowed."""
        return sum(cache.nbytes for cache in self._free)


class TreeMasks:
    """Attention masks of trees behind any number of committed tokens; no step builds one.

    Additive, not bool, as `eager` attention silently misreads a bool mask. A tree's buffer is (n, past_limit + n):
    zeros, then the tree's own (n, n). A mask is a window on it; a longer past moves its left edge.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device, self.past_limit = dtype, device, 0
        self._buffers: OrderedDict[int, tuple[Tree, torch.Tensor]] = OrderedDict()

    def allow_past(self, tokens: int) -> None:
        """Allow so many committed tokens from now on."""
        if tokens > self.past_limit:
            self.past_limit = tokens
            self._buffers.clear()

    def behind(self, past: int, tree: Tree) -> torch.Tensor:
        """Return the additive mask (n, past + n) of a tree behind `past` committed tokens."""
        if tree.once:
            return self._build(tree, past)
        buffer = self._buffers.get(id(tree))
        if buffer is None:
            # with the tree, which is kept alive so that its id is not reused
            buffer = self._buffers[id(tree)] = (tree, self._build(tree, self.past_limit))
            if len(self._buffers) > MOST_MASKS:
                self._buffers.popitem(last=False)
        mask = buffer[1][:, self.past_limit - past :]
        return self._empty(*mask.shape).copy_(mask) if mask.is_cuda else mask

    def _build(self, tree: Tree, past: int) -> torch.Tensor:
        mask = self._empty(len(tree), past + len(tree)).zero_()
        mask[:, past:].masked_fill_(~tree.ancestors.to(self.device), torch.finfo(self.dtype).min)
        return mask

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        """Return an empty (rows, columns) with aligned rows."""
        width = -(-columns // ALIGNED) * ALIGNED
        return torch.empty(rows, width, dtype=self.dtype, device=self.device)[:, :columns]


def _finite(states: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(states, nan=0.0, posinf=0.0, neginf=0.0)
