"""What a method needs beside the model: heads, a draft model, a datastore. Which it is, and whether it is there.

configs/companions says what there is for a model. A job that lacks its companion is told before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from model.errors import UserError
from model.files import located
from model.learned import eagle_head, medusa

from ..loading import hub


@dataclass(frozen=True)
class Kind:
    """A companion: its name in configs/companions, and in words; how to come by one; its files of weights, best first.

    Without weights it is a single file and no folder. An optional one may be null.
    """

    name: str
    words: str
    how: str
    weights: tuple[str, ...] = ()
    optional: bool = False


_HEADS = "`python -m tools.heads.train {}` trains one"
_DRAFT = "name a small model of the same vocabulary"
KINDS = {  # by the method's setting
    "heads_path": Kind("medusa", "Medusa heads", _HEADS.format("medusa"), (medusa.WEIGHTS, medusa.PUBLIC_WEIGHTS)),
    "head_path": Kind("eagle", "EAGLE head", _HEADS.format("eagle"), (eagle_head.WEIGHTS, eagle_head.PUBLIC_WEIGHTS)),
    "draft_path": Kind("draft", "draft model", _DRAFT, ("*.safetensors",)),
    "datastore_path": Kind("datastore", "datastore", "`python -m tools.datastore` builds one"),
    "table_path": Kind("ngram_table", "n-gram table", "`python -m tools.ngram_table` freezes one", optional=True),
}


def lacking(method: dict[str, Any], model: str) -> str:
    """Why a method cannot run for want of a companion, in words; empty if it can. Loads and fetches nothing.

    Args:
        method: its settings.
        model: the name of the model it is for.
    """
    for key, kind in KINDS.items():
        value = method.get(key)
        if key not in method or (value is None and kind.optional):
            continue
        if value is None:
            return f"no {kind.words} for {model} ({kind.how}; companions.{kind.name}=PATH names it)"
        path = located(str(value))
        if path.exists() or (kind.weights and hub.is_name(str(value)) and _to_be_had(str(value), kind)):
            continue
        if kind.weights and hub.is_name(str(value)):
            where = f"no such folder, and {constants.ENDPOINT} is not in reach"
        else:
            where = "no such folder" if kind.weights else "no such file"
        return f"no {kind.words} for {model} (method.{key}={value}: {where}; {kind.how})"
    return ""


def _to_be_had(name: str, kind: Kind) -> bool:
    return hub.held(name, kind.weights) is not None or hub.in_reach()


def make_ready(method: dict[str, Any], model: str) -> None:
    """Fetch what the method needs from the hub. Raises UserError if it lacks something."""
    if why := lacking(method, model):
        raise UserError(f"{method['name']}: not available: {why}")
    for key, value in method.items():
        where(key, value)


def where(key: str, value: Any) -> Path:
    """Where a method's path leads: in the file system, or for a companion's hub name its snapshot, fetched if need be.

    Raises:
        UserError: a hub name that cannot be fetched.
    """
    path, kind = located(str(value)), KINDS.get(key)
    if value is None or path.exists() or kind is None or not kind.weights or not hub.is_name(str(value)):
        return path
    return hub.fetched(str(value), kind.weights)
