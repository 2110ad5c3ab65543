"""The settings of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModelSettings:
    """The settings that decide which model is loaded and how; equal settings share a loaded model."""

    name: str
    path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Any] | None = None
    template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context: int | None = None
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    linear: Literal["auto", "half", "onednn", "fused", "torch"] = "auto"
    weights: Literal["float16", "float32"] | None = None
    quantize: Literal["int8", "int4"] | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    @property
    def kernel(self) -> str | None:
        """The attention that transformers loads the model with; its own choice for auto.

        That is sdpa, or eager for models without it (Gemma 2, gpt-oss).
        """
        return None if self.attention == "auto" else self.attention
