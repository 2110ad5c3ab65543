"""The decoding library; callers import the names below, or a class by its file."""

import importlib
import logging
from typing import Any

# If torchao is installed transformers imports it, and it logs every kernel that was not built for
# this machine.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

__version__ = "0.2.0"

_EXPORTS = {"Decoder": "decoder", "Generate": "generate", "METHODS": "methods"}
_EXPORTS |= dict.fromkeys(("DeviceDrafter", "Draft", "Drafter", "Session", "Tree"), "engine")


def __getattr__(name: str) -> Any:
    """Import an exported name on first use, as torch and transformers take seconds."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
