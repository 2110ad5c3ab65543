"""Attention implementations of transformers, for any model that asks its interface for one.

`AttentionSwitch` attends by a draft tree. `Grouped` is for models on a CPU whose heads share keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from ..errors import UserError
from .attention import TreeAttention

SDPA_GROUPED = "sdpa_grouped"
SETTING = "_attn_implementation_internal"  # of a transformers config: the name that each layer looks up
_switches: list[AttentionSwitch] = []  # by number, for compiled code; transformers keeps them for good, too


class AttentionSwitch:
    """A transformers attention implementation: a TreeAttention while one is in `use`, transformers' sdpa otherwise.

    Models build no mask for an implementation that has no entry in transformers' mask registry, and this has none. So
    outside `use`, as in a prefill, a mask that is needed must be given in 4D, or none and the text is causal.

    transformers knows implementations by name for the whole process, so each switch has a name of its own, for
    `model.set_attn_implementation(switch.name)`.
    """

    # Arguments by which models change what attention computes; the kernel has none of them.
    UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")

    def __init__(self) -> None:
        from transformers import AttentionInterface  # not above: it loads the whole of torch's compiler, Triton too

        self._sdpa = AttentionInterface()["sdpa"]
        self.active: TreeAttention | None = None
        self._thread = 0  # whose forwards it is for
        self.number = len(_switches)
        _switches.append(self)
        AttentionInterface.register(self.name, self)

    @property
    def name(self) -> str:
        return f"draft_tree_{self.number}"

    @contextmanager
    def use(self, attention: TreeAttention) -> Iterator[None]:
        """Attend by this until the block ends; only for forwards of this thread."""
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


class Grouped:
    """Reads shared keys and values where they are, inside `with`, if a model runs on a CPU by sdpa and its heads share.

    Where there is a mask, transformers' sdpa repeats them for every head before each product, as CUDA's kernels want
    it. torch's kernel for the CPU need not, and gives the same numbers to the last bit: a forward over a draft takes
    0.95 of the time (SmolLM2-135M, 9 heads on 3, 8 to 80 nodes behind 200 and 600 tokens).

    Outside `with` the model attends as before, and other threads' forwards inside it get the same numbers.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
        on_cpu = model.get_input_embeddings().weight.device.type == "cpu"
        self._settings = vars(config)  # written to as they are: a config's own way takes longer than the gain
        self._for_it = on_cpu and shared not in (None, heads) and self._settings.get(SETTING) == "sdpa"
        if self._for_it:
            from transformers import AttentionInterface, AttentionMaskInterface  # not above, as in AttentionSwitch

            AttentionInterface.register(SDPA_GROUPED, GroupedAttention())
            AttentionMaskInterface.register(SDPA_GROUPED, AttentionMaskInterface()["sdpa"])  # so that padding works

    def __enter__(self) -> None:
        if self._for_it and self._settings[SETTING] == "sdpa":
            self._settings[SETTING] = SDPA_GROUPED

    def __exit__(self, *error: object) -> None:
        if self._for_it and self._settings[SETTING] == SDPA_GROUPED:
            self._settings[SETTING] = "sdpa"


class GroupedAttention:
    """A transformers attention implementation; where it has no gain of its own it is transformers' sdpa."""

    def __init__(self) -> None:
        from transformers import AttentionInterface

        self._sdpa = AttentionInterface()["sdpa"]  # looked up once: each layer of each forward calls

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
        """transformers' contract: query (1, H, n, D), key and value (1, Hkv, L, D) -> (1, n, H, D)."""
        grouped = attention_mask is not None and query.shape[2] > 1 and query.device.type == "cpu"  # or spread
        if not grouped or any(kwargs.get(name) is not None for name in AttentionSwitch.UNSUPPORTED):
            output: tuple[torch.Tensor, None] = self._sdpa(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
            return output
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2).contiguous(), None
