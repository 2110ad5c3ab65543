"""Which model is loaded, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModelSettings:
    """What decides which model is loaded and how; equal settings share one loaded model."""

    name: str
    path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Any] | None = None
    tensor_parallel: bool = False
    template: str | None = None
    context: int | None = None
    attention: Literal["auto", "sdpa", "eager", "tree"] = "auto"
    linear: Literal["auto", "packed", "joint", "stock"] = "auto"
    quantize: Literal["int8", "int4"] | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    @property
    def kernel(self) -> str | None:
        """What transformers loads the model with; tree stands on sdpa, and with auto it is transformers' own choice:
        sdpa, or eager for what has none (Gemma 2, gpt-oss)."""
        return None if self.attention == "auto" else "eager" if self.attention == "eager" else "sdpa"

    @property
    def first_execution(self) -> str:
        """Until a run says which: what goes with the attention."""
        return "static" if self.attention == "tree" else "eager"
