"""Attention by a `Sight`: on CUDA in a kernel (`tree_kernel`), elsewhere a sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...devices import current, without_cudnn
from .sight import BASE, COUNT, LENGTH, WORDS, Sight, additive

# What a config says instead of sdpa for a moment. Transformers has one list of names in a process,
# and the repository's package and an installed copy may both be loaded.
NAME = f"sdpa_of_{__package__}"
# of a transformers config: the name that each layer looks up
SETTING = "_attn_implementation_internal"
# Arguments by which models change what attention computes
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")
# a sequence's rows, its columns, its mask; None: it sees all of them
Part = tuple[slice, slice, Tensor | None]


class TreeAttention:
    """A transformers attention implementation that takes a `Sight` as its mask, too.

    With any other mask it is sdpa, but keys and values that heads share are not copied on a CPU:
    torch's kernel needs no copies, and its results are bit-identical.
    """

    def __init__(self) -> None:
        from transformers import AttentionInterface  # not above: it loads torch's compiler

        # Looked up once, as each layer of each forward calls it
        self._sdpa: Callable[..., tuple[Tensor, None]] = AttentionInterface()["sdpa"]

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend: query (1, H, n, D), key and value (1, Hkv, L, D) -> (1, n, H, D)."""
        on_cpu = query.device.type == "cpu"
        plain = not dropout and all(kwargs.get(name) is None for name in UNSUPPORTED)
        if attention_mask is not None and attention_mask.dtype == torch.long:
            sight = Sight(attention_mask[0, 0], attention_mask.shape[1])
            if plain and on_cpu and not torch.compiler.is_compiling():
                parts = parts_of(attention_mask, query.dtype)
                return _attend_in_turn(query, key, value, parts, scaling), None
            if plain:
                scaling = query.shape[3] ** -0.5 if scaling is None else scaling
                return attend_by_table(query, key, value, *sight, scaling), None
            attention_mask = additive(sight.seen(key.shape[2])[0], query.dtype)[None, None]
        elif attention_mask is not None and plain and on_cpu and query.shape[2] > 1:
            return _attend(query, key, value, attention_mask, scaling), None
        return self._sdpa(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )


def _attend_in_turn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: list[Part],
    scaling: float | None,
) -> Tensor:
    attended = [
        _attend(query[:, :, rows], key[:, :, columns], value[:, :, columns], mask, scaling)
        for rows, columns, mask in parts
    ]
    return attended[0] if len(parts) == 1 else torch.cat(attended, 1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended.transpose(1, 2).contiguous()  # (1, n, H, D)


@lru_cache(maxsize=1)  # read once a forward, not once a layer
def parts_of(sight: Tensor, dtype: torch.dtype) -> list[Part]:
    """Return the part of each sequence that has rows, of `Sight.as_mask`."""
    table = sight[0, 0].numpy()
    bits = np.unpackbits(table[:, WORDS:].copy().view(np.uint8), axis=1, bitorder="little")
    parts = list[Part]()
    for first, count in table[: sight.shape[1], : COUNT + 1].tolist():
        if count:
            base, length = table[first, BASE : LENGTH + 1].tolist()
            rows = slice(first, first + count)
            visible = torch.from_numpy(bits[rows, :count].astype(bool))
            mask = additive(visible, dtype, length)[None, None] if count > 1 else None
            parts.append((rows, slice(base, base + length + count), mask))
    return parts


@torch.library.custom_op(f"{__package__.replace('.', '_')}::attend", mutates_args=())
def attend_by_table(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    sequences: int,
    scaling: float,
) -> Tensor:
    """Attend by a `Sight`, as one operator: (1, H, n, D), (1, Hkv, C, D) -> (1, n, H, Dv)."""
    if query.device.type == "cpu":
        parts = parts_of(Sight(table, sequences).as_mask, query.dtype)
        return _attend_in_turn(query, key, value, parts, scaling)
    from .tree_kernel import attend  # only on a GPU: it imports Triton

    # Triton launches on the current device, whatever its arguments are on
    with current(query.device):
        return attend(query, key, value, table, sequences, scaling)


@attend_by_table.register_fake
def _(query: Any, key: Any, value: Any, table: Any, sequences: int, scaling: float) -> Any:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, TreeAttention())
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])  # so that padding works


class Attending:
    """Switches a model to `TreeAttention` inside `by`, where that gains something."""

    def __init__(self, model: Any) -> None:
        self._config = config = model.config.get_text_config()
        heads, shared = (
            getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
        )
        self._device = model.get_input_embeddings().weight.device
        self._shares = self._device.type == "cpu" and shared not in (None, heads)
        if self.is_sdpa:
            _register()

    @property
    def is_sdpa(self) -> bool:
        return vars(self._config).get(SETTING) in ("sdpa", NAME)

    @contextmanager
    def by(self, mask: Any) -> Iterator[None]:
        of_sight = isinstance(mask, Tensor) and mask.dtype == torch.long
        # written directly: a config's own setter takes longer than the gain
        names = vars(self._config)
        before = names[SETTING]
        if (of_sight or self._shares) and self.is_sdpa:
            names[SETTING] = NAME  # other threads' forwards get the same numbers by it
        try:
            with without_cudnn(self._device):
                yield
        finally:
            names[SETTING] = before
