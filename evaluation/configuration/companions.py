"""Companions: what a method needs next to the model, as heads, a draft model or a datastore.

configs/companions lists them by model. A job without its companion is reported before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from model.errors import UserError
from model.files import located
from model.methods import medusa
from model.structures import heads

from ..loading import hub


@dataclass(frozen=True)
class Kind:
    """A kind of companion.

    Attributes:
        name: its key in configs/companions.
        words: its name in messages.
        how: how to get one.
        weights: patterns of its weight files, best first; empty for a single file.
    """

    name: str
    words: str
    how: str
    weights: tuple[str, ...] = ()


_HEADS = "`python -m tools.heads {}` trains one"
_DRAFT = "name a small model of the same vocabulary"
KINDS = {  # by the method's setting
    "heads_path": Kind("medusa", "Medusa heads", _HEADS.format("medusa"), (medusa.WEIGHTS, medusa.PUBLIC_WEIGHTS)),
    "head_path": Kind("eagle", "EAGLE head", _HEADS.format("eagle"), (heads.WEIGHTS, heads.PUBLIC_WEIGHTS)),
    "draft_path": Kind("draft", "draft model", _DRAFT, ("*.safetensors",)),
    "datastore_path": Kind("datastore", "datastore", "`python -m tools.datastore` builds one"),
}


def missing_companion(method: dict[str, Any], model: str) -> str:
    """Say which companion a method lacks; empty if it lacks none. Loads and fetches nothing.

    Args:
        method: its settings.
        model: the model's name.
    """
    for key, kind in KINDS.items():
        value = method.get(key)
        if key not in method:
            continue
        if value is None:
            return f"no {kind.words} for {model} ({kind.how}; companions.{kind.name}=PATH names it)"
        path = located(str(value))
        if path.exists() or (kind.weights and hub.is_name(str(value)) and _is_available(str(value), kind)):
            continue
        if kind.weights and hub.is_name(str(value)):
            reason = f"no such folder, and {constants.ENDPOINT} is not in reach"
        else:
            reason = "no such folder" if kind.weights else "no such file"
        return f"no {kind.words} for {model} (method.{key}={value}: {reason}; {kind.how})"
    return ""


def _is_available(name: str, kind: Kind) -> bool:
    return hub.local_snapshot(name, kind.weights) is not None or hub.is_reachable()


def fetch_companions(method: dict[str, Any], model: str) -> None:
    """Fetch a method's companions from the hub. Raises UserError if one is missing."""
    if why := missing_companion(method, model):
        raise UserError(f"{method['name']}: not available: {why}")
    for key, value in method.items():
        path_of(key, value)


def path_of(key: str, value: Any) -> Path:
    """Return the path of a method's setting: a file or folder, or the snapshot of a hub name, fetched if needed.

    Raises:
        UserError: a hub name that cannot be fetched.
    """
    path, kind = located(str(value)), KINDS.get(key)
    if value is None or path.exists() or kind is None or not kind.weights or not hub.is_name(str(value)):
        return path
    return hub.fetch_snapshot(str(value), kind.weights)
