"""Preallocated KV cache that commits an accepted path in place.

Stock caches cannot: DynamicCache reallocates at every step, StaticCache attends over its whole
capacity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionLayer

from .sight import ALIGNED

MAX_FREE = 3  # caches kept after simultaneous sequences

# transformers' class for a layer without keys and values; older versions lack it.
NoLayer: Any = getattr(cache_utils, "DummyLayer", DynamicLayer)


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches for a token."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    index_dim: int = 0  # width of an index key; 0: there is none


@dataclass
class Cursor:
    """Where the next forward writes. Layers hold it, as they must not hold the cache (a cycle)."""

    lengths: list[int]  # committed tokens of each stretch
    # added to the reported length in the load trial, to find models that use it as a position
    ahead: int = 0
    # in static steps, int64 (n,): positions, as the host does not know the length
    write_at: Tensor | None = None
    # in static steps, the columns that a step attends over; what it sees of them is for its mask
    bucket: int = 0

    @property
    def length(self) -> int:
        return self.lengths[0]


class TreeCacheLayer(CacheLayerMixin):
    """A view of one layer in the cache's buffers; keys and values are (1, heads, capacity, dim)."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()
        self.cursor = cursor
        self.keys = self.values = torch.empty(0)
        # (1, 1, capacity, index_dim), by which sparse attention chooses what it reads
        self.index_keys = self.keys
        self._positions: Tensor | None = None
        self.is_initialized = True

    def lazy_initialization(self, *args: Tensor) -> None:
        """Nothing is lazy here."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new states (1, heads, n, dim) after the committed tokens; return all in use.

        NaN and infinity become 0, as no mask silences them (0 x NaN is NaN): a draft token's would
        reach its siblings.
        """
        assert self.keys is not None and self.values is not None
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def update_indexer(self, states: Tensor) -> Tensor:
        """Write index keys (1, n, index_dim) as `update` does."""
        return self._written(self.index_keys, states[:, None])[:, 0]

    def _written(self, buffer: Tensor, states: Tensor) -> Tensor:
        states = states.to(buffer.dtype)  # under autocast another one
        if (at := self.cursor.write_at) is not None:
            buffer.index_copy_(2, at, torch.nan_to_num(states, nan=0.0, posinf=0.0, neginf=0.0))
            return buffer[:, :, : self.cursor.bucket]
        start = self.cursor.length
        end = self.cursor.length + states.shape[2]
        # as fast as a copy
        torch.nan_to_num(states, nan=0.0, posinf=0.0, neginf=0.0, out=buffer[:, :, start:end])
        return buffer[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.length + query_length, 0

    def get_seq_length(self) -> int:
        # a layer without heads stores nothing
        stores = self.keys is not None and self.keys.shape[1] > 0
        return self.cursor.length + self.cursor.ahead if stores else 0

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions (d, 1, length) of the committed tokens."""
        if self.cursor.length == 0 or self._positions is None:
            return None
        committed = torch.arange(self.cursor.length, device=self._positions.device)
        return committed.expand(*self._positions.shape[:-1], -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        self._positions = positions

    def get_max_length(self) -> int:
        return self.keys.shape[2] if self.keys is not None else 0

    get_max_cache_shape = get_max_length  # its name in transformers before 5.19


class RecurrentTreeLayer(LinearAttentionLayer, TreeCacheLayer):
    is_compileable = False

    def __init__(self, states: int, cursor: Cursor) -> None:
        TreeCacheLayer.__init__(self, cursor)
        LinearAttentionLayer.__init__(self, number_of_states=states)


class TreeCache(Cache):
    """All layers' keys and values, one allocation for each kind of layer (device, shape).

    A recurrent state cannot take back tokens, so it is copied before a draft. If a part of the
    draft is rejected, the copy is restored, and the accepted tokens are forwarded again.

    Args:
        shapes: one entry a layer; None for a layer without keys and values of its own.
        capacity: tokens; must hold a prompt, its answer and one draft.
        states: how many recurrent states each layer has; () for a model without any.
        stretches: equal parts of the columns, one for each sequence of a batch.

    Attributes:
        lengths: committed tokens of each stretch.
        pending: accepted tokens after `length`, which the recurrent states have not read.
        forwarded: tokens that the last forward read after `length`; None: states end at `length`.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape | None],
        capacity: int,
        states: Sequence[int] = (),
        stretches: int = 1,
    ) -> None:
        self.lengths = [0] * stretches
        self.cursor = Cursor(self.lengths)
        self.text: list[int] = []  # token ids that the last sequence committed
        self.committed_by: tuple[Any, ...] = ()  # by which method and weights
        self.pending: list[int] = []
        self.forwarded: list[int] | None = None
        self._copies: list[Tensor] = []  # of the states, before the last draft
        groups = defaultdict[LayerShape, list[int]](list)
        for i, shape in enumerate(shapes):
            if shape is not None:
                groups[shape].append(i)
        self._groups = list(groups.items())
        # keys and values of each group: (layers, heads, capacity, dim)
        self._buffers: list[Tensor] = []
        layers = list[Any]()
        counts = states or [0] * len(shapes)
        for shape, count in zip(shapes, counts, strict=True):
            if shape is None:
                layers.append(LinearAttentionLayer(number_of_states=count) if count else NoLayer())
            elif count:
                layers.append(RecurrentTreeLayer(count, self.cursor))
            else:
                layers.append(TreeCacheLayer(self.cursor))
        super().__init__(layers=layers)
        self.recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        buffers = list[tuple[str, list[int], Tensor]]()
        for shape, members in self._groups:
            kinds = [("keys", shape.heads, shape.key_dim), ("values", shape.heads, shape.value_dim)]
            if shape.index_dim:
                kinds.append(("index_keys", 1, shape.index_dim))
            for name, heads, dim in kinds:
                buffer = torch.zeros(
                    len(members), heads, capacity, dim, dtype=shape.dtype, device=shape.device
                )
                buffers.append((name, members, buffer))
        length = max(self.lengths)
        split = (len(self.lengths), -1)
        for before, (_, _, buffer) in zip(self._buffers, buffers, strict=False):
            # (layers, heads, stretches, columns, dim)
            old = torch.unflatten(before, 2, split)
            torch.unflatten(buffer, 2, split)[:, :, :, :length] = old[:, :, :, :length]
        # only now, as memory may not have sufficed for the last one
        for name, members, buffer in buffers:
            for row, i in enumerate(members):
                setattr(self.layers[i], name, buffer[row : row + 1])
        self._buffers = [buffer for _, _, buffer in buffers]
        self.capacity = capacity

    @property
    def room(self) -> int:
        """Columns of a stretch."""
        return self.capacity // len(self.lengths)

    def make_room(self, tokens: int, limit: int = 0) -> None:
        """Make each stretch hold so many tokens; it grows at least twofold if `limit` allows."""
        if tokens > self.room:
            room = -(-max(tokens, min(2 * self.room, limit)) // ALIGNED) * ALIGNED
            self._allocate(room * len(self.lengths))

    @property
    def length(self) -> int:
        return self.lengths[0]

    @length.setter
    def length(self, tokens: int) -> None:
        self.lengths[0] = tokens

    def reset(self) -> None:
        """Forget all tokens; nothing after `length` is attended to."""
        self.length = 0
        self.text = []
        self.pending = []
        self.forwarded = None
        self._reset_states()

    def common(self, prompt: Sequence[int], committed_by: tuple[Any, ...]) -> int:
        """Return how many of the prompt's first tokens, except its last one, are committed."""
        if self.committed_by != committed_by:
            return 0
        pairs = zip(self.text, prompt[:-1], strict=False)
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # recurrent states can be reused only by a prompt that continues all of their text
        return 0 if self.recurrent and count < len(self.text) else count

    def keep(self, prompt: Sequence[int], committed_by: tuple[Any, ...] = ()) -> None:
        """Keep the committed beginning of this prompt and forget the rest.

        Args:
            committed_by: method and weights; what others committed is forgotten.
        """
        count = self.common(prompt, committed_by)
        if not count:
            self.reset()
        self.length = count
        self.text = self.text[:count]
        self.pending = []
        self.committed_by = committed_by

    def commit(self, *paths: Sequence[int]) -> None:
        """Keep tokens that the last forward wrote.

        Args:
            paths: of each stretch, its accepted nodes, root first.
        """
        if self.recurrent:
            self._commit_read(len(paths[0]))
            return
        source = list[int]()
        to = list[int]()
        for stretch, path in enumerate(paths):
            first = stretch * self.room + self.lengths[stretch]
            moved = [(node, i) for i, node in enumerate(path) if node != i]
            source += [first + node for node, _ in moved]
            to += [first + i for _, i in moved]
            self.lengths[stretch] += len(path)
        if source:
            self.move(torch.tensor(source), torch.tensor(to))

    def _commit_read(self, count: int) -> None:
        assert self.forwarded is not None
        accepted = self.forwarded[: len(self.pending) + count]
        if len(accepted) == len(self.forwarded):  # the states have read nothing else
            self.length = self.length + len(accepted)
            self.pending = []
        else:
            self.pending = accepted
            if self._copies:
                torch._foreach_copy_(self._states(), self._copies)
            else:  # there was nothing before the draft
                self._reset_states()
        self.forwarded = None

    def _reset_states(self) -> None:
        for layer in self.recurrent:
            layer.reset()

    def _states(self) -> list[Tensor]:
        states = [
            s
            for layer in self.recurrent
            for s in (*layer.conv_states.values(), *layer.recurrent_states.values())
        ]
        has_read = any(any(layer.has_previous_state.values()) for layer in self.recurrent)
        return [state for state in states if state is not None] if has_read else []

    def will_read(self, tokens: list[int]) -> list[int]:
        """Return the tokens to forward for these n, pending ones first. Copies states if n > 1."""
        self.forwarded = self.pending + tokens
        if len(tokens) > 1:
            self._copies = [state.clone() for state in self._states()]
        return self.forwarded

    def record(self, text: list[int]) -> None:
        """Note an ending sequence's committed text, or nothing if states read more."""
        # a step failed in its forward, or after it
        read_more = self.forwarded is not None or len(text) < self.length
        self.text = [] if self.recurrent and read_more else text[: self.length]

    def take(self, stretch: int, other: TreeCache) -> None:
        """Copy another cache's committed tokens to a stretch with room for them."""
        base = stretch * self.room
        for buffer, states in zip(self._buffers, other._buffers, strict=True):
            buffer[:, :, base : base + other.length] = states[:, :, : other.length]
        self.lengths[stretch] = other.length

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy columns `source` (m,) to columns `target` (m,) in all layers."""
        for buffer in self._buffers:
            rows = buffer.index_select(2, source.to(buffer.device, non_blocking=True))
            buffer.index_copy_(2, target.to(buffer.device, non_blocking=True), rows)


class CachePool:
    """Caches that sequences borrow; threads that share the pool hold the model's lock."""

    def __init__(self, make: Callable[..., TreeCache]) -> None:
        self.make = make
        self._free: list[TreeCache] = []

    def drop(self) -> None:
        """Free the caches that are not borrowed, as a failed graph may have written anything."""
        self._free.clear()

    @contextmanager
    def borrowed(
        self, capacity: int, prompt: Sequence[int] = (), committed_by: tuple[Any, ...] = ()
    ) -> Iterator[TreeCache]:
        """Yield a cache of this capacity that holds at most a committed beginning of the prompt."""
        # the one with most of the prompt, then one that is large enough already, then the newest
        cache = max(
            reversed(self._free),
            key=lambda cache: (cache.common(prompt, committed_by), cache.capacity >= capacity),
            default=None,
        )
        if cache is None:
            cache = self.make(capacity)
        else:
            self._free.remove(cache)
            cache.make_room(capacity)
        cache.keep(prompt, committed_by)
        try:
            yield cache
        finally:
            self._free.append(cache)
            del self._free[:-MAX_FREE]
