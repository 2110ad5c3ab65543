"""Tree attention as an attention implementation of transformers, for any model that asks its interface for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from ..errors import UserError
from .attention import TreeAttention

_switches: list[AttentionSwitch] = []  # by number, for compiled code; transformers keeps them for good, too


class AttentionSwitch:
    """A transformers attention implementation: a TreeAttention while one is in `use`, transformers' sdpa otherwise.

    Models build no mask for an implementation that has no entry in transformers' mask registry, and this has none. So
    outside `use`, as in a prefill, a mask that is needed must be given in 4D, or none and the text is causal.
    """

    # Arguments that models give to change what attention computes, none of which the kernel knows.
    UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")

    def __init__(self) -> None:
        from transformers import AttentionInterface  # not above: it loads the whole of torch's compiler, Triton too

        self._sdpa = AttentionInterface()["sdpa"]
        self.active: TreeAttention | None = None
        self._thread = 0  # whose forwards it is for
        self.number = len(_switches)
        _switches.append(self)

    @property
    def name(self) -> str:
        return f"draft_tree_{self.number}"

    @contextmanager
    def use(self, attention: TreeAttention) -> Iterator[None]:
        """Attend by this until the block ends, in this thread: what others do with the model meanwhile is theirs."""
        before, self.active = self.active, attention
        self._thread = get_ident()
        try:
            yield
        finally:
            self.active = before

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' contract: query (1, H, n, D), key and value (1, Hkv, B, D) -> (1, n, H, D).

        Raises:
            UserError: a mask, a dropout or a score modification comes with a tree; it would have no effect.
        """
        compiling = torch.compiler.is_compiling()  # which a step of this thread's does alone
        if self.active is None or (not compiling and get_ident() != self._thread):
            output: tuple[torch.Tensor, None] = self._sdpa(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
            return output
        given = [name for name in self.UNSUPPORTED if kwargs.get(name) is not None]
        given += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * bool(dropout)
        if given:
            raise UserError(f"tree attention: {type(module).__name__} asks for {', '.join(given)}; use sdpa")
        if compiling:
            return _attend(query, key, value, scaling, self.number), None
        return self.active(query, key, value, scale=scaling).transpose(1, 2).contiguous(), None


@torch.library.custom_op("draft_tree::attend", mutates_args=())
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, switch: int) -> torch.Tensor:
    """A switch's active tree attention as an operator that no compiler looks into: (1, H, n, D) -> (1, n, H, D).

    So one compiled forward serves all trees and buckets. What it returns is its own: a compiler may write over it.
    """
    active = _switches[switch].active
    assert active is not None
    return active(q, k, v, scale=scale).transpose(1, 2).clone(memory_format=torch.contiguous_format)


@_attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, switch: int) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def register_tree_attention(name: str | None = None) -> AttentionSwitch:
    """Make `model.set_attn_implementation(name)` possible; what is returned says when a tree is attended by.

    transformers knows implementations by name for the whole process, so each switch has a name of its own by default.
    """
    from transformers import AttentionInterface

    switch = AttentionSwitch()
    AttentionInterface.register(name or switch.name, switch)
    return switch
