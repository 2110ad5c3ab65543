"""Which model is loaded, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSettings:
    """What decides which model is loaded and how; equal settings share one loaded model."""

    name: str
    path: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | dict[str, Any] | None = None
    tensor_parallel: bool = False
    template: str | None = None
    context: int | None = None
    attention: str = "sdpa"
    linear: str = "auto"
    allow_pickle: bool = False
    trust_remote_code: bool = False

    @property
    def kernel(self) -> str:
        """What transformers loads the model with; attention=tree stands on sdpa."""
        return "sdpa" if self.attention == "tree" else self.attention

    @property
    def first_execution(self) -> str:
        """Until a run says which: what goes with the attention."""
        return "static" if self.attention == "tree" else "eager"
