"""The decoding library: one engine (`engine/`), the paper (`recycling/`), other methods (`methods/`).

Imports itself relatively and knows neither Hydra nor the harness, so that it can be vendored under another name.

From outside: what is named here, any class by its file; `errors` and `files` are everyone's.
"""

import importlib
import logging
from typing import Any

# If torchao is installed transformers imports it, and it logs every kernel that was not built for this machine.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

__version__ = "0.2.0"

_EXPORTS = {"Decoder": "decoder", "Generate": "generate", "METHODS": "methods"}
_EXPORTS |= dict.fromkeys(("DeviceDrafter", "Draft", "Drafter", "Session", "Tree"), "engine")


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used: torch and transformers take seconds."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
