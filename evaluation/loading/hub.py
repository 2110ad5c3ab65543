"""The companions that methods need next to the model: heads, a draft model or a datastore."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants

from model.errors import UserError
from model.files import located, missing_weights, unusable
from model.hub import (
    SAFETENSORS,
    is_name,
    is_reachable,
    local_snapshot,
    snapshot,
)
from model.methods.trained import eagle, hydra, medusa
from model.methods.trained.heads import PUBLIC


class Kind(NamedTuple):
    name: str  # its key in configs/companions
    words: str  # its name in messages
    how: str  # how to get one
    # its weight files, best first; empty for a single file
    weights: tuple[str, ...] = ()


_DRAFT = "name a small model of the same vocabulary"
# by the method's setting
KINDS = {
    "heads_path": Kind("medusa", "Medusa heads", PUBLIC, medusa.WEIGHTS),
    "hydra_path": Kind("hydra", "Hydra heads", PUBLIC, hydra.WEIGHTS),
    "head_path": Kind("eagle", "EAGLE head", PUBLIC, eagle.WEIGHTS),
    "eagle3_path": Kind("eagle3", "EAGLE-3 head", PUBLIC, eagle.WEIGHTS),
    "draft_path": Kind("draft", "draft model", _DRAFT, SAFETENSORS),
    "datastore_path": Kind("datastore", "datastore", "`python -m tools.datastore` builds one"),
}


def missing_companion(method: dict[str, Any], model: str) -> str:
    """Say which companion a method lacks; empty if none."""
    for key in KINDS.keys() & method.keys():
        kind = KINDS[key]
        value = method[key]
        if value is None:
            return f"no {kind.words} for {model} ({kind.how}; companions.{kind.name}=PATH names it)"
        path = str(value)
        if located(path).exists():
            continue
        on_hub = bool(kind.weights) and is_name(path)
        if on_hub and (is_reachable() or local_snapshot(path)):
            continue
        reason = f"no such {'folder' if kind.weights else 'file'}"
        reason += f", and {constants.ENDPOINT} is not in reach" if on_hub else ""
        return f"no {kind.words} for {model} (method.{key}={value}: {reason}; {kind.how})"

    return ""


def fetch_companions(method: dict[str, Any], model: str) -> None:
    """Fetch a method's companions. Raises UserError if one is missing or lacks weights."""
    if why := missing_companion(method, model):
        raise UserError(f"{method['name']}: not available: {why}")
    for key in KINDS.keys() & method.keys():
        path = path_of(key, str(method[key]))
        weights = KINDS[key].weights
        if weights and (why := unusable(path) or missing_weights(path, weights)):
            raise UserError(f"{path}: {why}")


def path_of(key: str, value: str) -> Path:
    """Return the file or folder that a method's setting names, fetched if it is on the hub.

    Raises UserError if it cannot be fetched.
    """
    path = located(value)
    weights = KINDS[key].weights if key in KINDS else ()
    if path.exists() or not weights or not is_name(value):
        return path
    return snapshot(value, f"method.{key}={value}", weights)
