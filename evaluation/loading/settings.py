"""The settings of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from model.errors import UserError
from model.linear_choice import Linear

# others may be there: Mistral's consolidated.safetensors repeats the weights
SAFETENSORS = "model*.safetensors"


@dataclass(frozen=True)
class ModelSettings:
    """The settings that decide which model is loaded and how.

    Equal settings share a loaded model.
    """

    name: str
    path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    device_map: (
        Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Any] | None
    ) = None
    template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context: int | None = None
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    linear: Linear = "auto"
    weights: Literal["float16", "float32"] | None = None
    quantize: Literal["int8", "int4"] | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Raise UserError if settings contradict each other."""
        if self.device_map is not None and self.device != "auto":
            raise UserError(
                f"model.device={self.device} and model.device_map={self.device_map}: give one of"
                " the two"
            )
        if self.device_map is not None and self.quantize is not None:
            raise UserError(
                f"model.quantize={self.quantize}: is for a model on one device;"
                " leave out device_map"
            )

    @property
    def kernel(self) -> str | None:
        """The attention to load with.

        None: transformers' choice, sdpa, or eager for Gemma 2 and gpt-oss.
        """
        return None if self.attention == "auto" else self.attention

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Patterns of the weight files that transformers reads, best first."""
        return (SAFETENSORS, "pytorch_model*.bin") if self.allow_pickle else (SAFETENSORS,)
