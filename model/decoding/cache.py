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
    """What one layer caches a token: heads, width of key and value, where and in what type."""

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
        write_at: in static steps, int64 (n,): the positions, as the host does not know the length;
        bucket: and how much of the cache a step attends over; its mask hides what is not in use.
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
        self.text: list[int] = []  # token ids of what the last sequence committed, as far as they are its text
        self.made_by: tuple[Any, ...] = ()  # who committed it: the method, and the weights as they were then
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

    def keep(self, prompt: Sequence[int], made_by: tuple[Any, ...] = ()) -> int:
        """Keep what is committed of this prompt's beginning, less its last token, and forget the rest.

        Args:
            made_by: who may go on with it; what others committed is forgotten.

        Returns:
            How many tokens.
        """
        if self.made_by != made_by:
            self.reset()
        same = next((i for i, (a, b) in enumerate(zip(self.text, prompt, strict=False)) if a != b), len(self.text))
        self.length = min(same, len(prompt) - 1)
        self.text = self.text[: self.length]
        return self.length

    def commit(self, count: int, nodes: torch.Tensor | None = None) -> None:
        """Keep `count` of the tokens that the last forward wrote.

        Args:
            count: how many, the root included.
            nodes: int64 (count - 1,), the accepted nodes below the root in order; None where they are simply the first
                `count` (a prompt, a chain), which moves nothing.
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
    """Caches that sequences borrow: those one after the other the same one, those at one time each its own.

    Threads may share it: each call of the list is one piece, and nothing is assumed between two of them.

    Args:
        make: a cache with room for so many tokens.
    """

    def __init__(self, make: Callable[[int], TreeCache]) -> None:
        self._make = make
        self._free: list[TreeCache] = []

    def reserve(self, capacity: int) -> None:
        """See to it that the next sequence finds a cache with that room. Free of cost where it does already."""
        self._free.append(self._taken(capacity))

    @contextmanager
    def borrowed(self, capacity: int, prompt: Sequence[int] = (), made_by: tuple[Any, ...] = ()) -> Iterator[TreeCache]:
        """A cache with room for so many tokens, empty but for what the last sequence on it had of this prompt.

        Args:
            prompt, made_by: as `TreeCache.keep` takes them.
        """
        cache = self._taken(capacity)
        cache.keep(prompt, made_by) if prompt else cache.reset()
        cache.made_by = made_by
        try:
            yield cache
        finally:
            self._free.append(cache)

    def _taken(self, capacity: int) -> TreeCache:
        """A cache with that room, out of the pool: the one that was put back last, or a new one."""
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
        """Bytes of those that nobody has now."""
        return sum(cache.nbytes for cache in self._free)


class TreeMasks:
    """What the nodes of a tree attend to behind any number of committed tokens; no step builds a mask.

    Additive, and not bool, as `eager` attention reads a bool mask wrongly and in silence. A tree's buffer is
    (n, room + n): zeros, then the tree's own (n, n). A mask is a part of it, whose left edge is all that a longer past
    moves.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device, self.room = dtype, device, 0
        self._kept: OrderedDict[int, tuple[Tree, torch.Tensor]] = OrderedDict()

    def make_room(self, tokens: int) -> None:
        """So many tokens may be committed from now on."""
        if tokens > self.room:
            self.room = tokens
            self._kept.clear()

    def behind(self, past: int, tree: Tree) -> torch.Tensor:
        """Additive mask (n, past + n) of a tree behind `past` committed tokens."""
        if tree.once:
            return self._made(tree, past)
        buffer = self._kept.get(id(tree))
        if buffer is None:
            buffer = self._kept[id(tree)] = (tree, self._made(tree, self.room))  # holds the tree: its id stays its own
            if len(self._kept) > MOST_MASKS:
                self._kept.popitem(last=False)
        mask = buffer[1][:, self.room - past :]
        return self._empty(*mask.shape).copy_(mask) if mask.is_cuda else mask

    def _made(self, tree: Tree, past: int) -> torch.Tensor:
        mask = self._empty(len(tree), past + len(tree)).zero_()
        mask[:, past:].masked_fill_(~tree.ancestors.to(self.device), torch.finfo(self.dtype).min)
        return mask

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        """(rows, columns), each row aligned."""
        width = -(-columns // ALIGNED) * ALIGNED
        return torch.empty(rows, width, dtype=self.dtype, device=self.device)[:, :columns]


def _finite(states: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(states, nan=0.0, posinf=0.0, neginf=0.0)
