"""Repositories of the model hub, and the companions that methods need next to the model.

A repository is found on this machine or fetched. The hub's client checks sizes, and a file appears
in a snapshot only when it is complete.

Companions are heads, a draft model or a datastore; configs/companions lists them by model. A job
without its companion is reported before anything is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from model.errors import UserError, one_line
from model.files import located
from model.methods import eagle, hydra, medusa
from model.pretrained import is_reachable as is_reachable
from model.structures.heads import UNTRAINED

# others may be there: Mistral's consolidated.safetensors repeats the weights
SAFETENSORS = "model*.safetensors"
SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")  # files that are not weights


def is_name(path: str) -> bool:
    """True if this could be a repository's name, owner/name.

    The caller checks first that it is no folder.
    """
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) is not None


def local_snapshot(name: str, weights: Sequence[str], revision: str | None = None) -> Path | None:
    """Return the repository's snapshot on this machine; None if its weights are missing.

    Uses no network.

    Args:
        weights: patterns of weight files, best first; one kind suffices.
    """
    try:
        folder = Path(
            huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True)
        )
    except (OSError, ValueError):  # LocalEntryNotFoundError is both
        return None

    return None if missing_weights(folder, weights) else folder


def fetch_snapshot(name: str, weights: Sequence[str], revision: str | None = None) -> Path:
    """Return the repository's snapshot, fetched if needed.

    It holds small files, and the best kind of weights.

    Raises:
        UserError: unreachable, no such repository, no weights of these kinds.
    """
    if folder := local_snapshot(name, weights, revision):
        return folder
    if not is_reachable():
        raise UserError(
            f"{name}: {constants.ENDPOINT} is not in reach, and this machine holds no copy"
        )

    try:
        files = huggingface_hub.list_repo_files(name, revision=revision)
        kinds = [kind for kind in weights if any(Path(file).match(kind) for file in files)]
        patterns = [*SMALL, *kinds[:1]]
        folder = Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns)
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UserError(f"{name}: cannot be fetched ({one_line(error)[:300]})") from None

    if why := missing_weights(folder, weights):
        raise UserError(f"{name}: {why}")
    return folder


def missing_weights(folder: Path, weights: Sequence[str]) -> str:
    """Name the missing or broken weights of a folder.

    The text is empty if one kind is complete, with every file of its index.
    """
    problems = []
    for kind in weights:
        files = {path.name for path in folder.glob(kind)}
        file = ""
        try:
            for index in folder.glob(f"{kind}.index.json"):
                file = index.name
                files |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            for file in sorted(files):
                if kind.endswith(".safetensors"):  # whose header gives the file's length
                    with safe_open(folder / file, "pt"):
                        pass
                else:
                    (folder / file).stat()
        except FileNotFoundError:
            problems.append(f"{file} is missing")
        except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
            problems.append(f"{file} is cut short or broken ({one_line(error)[:80]})")
        else:
            if files:
                return ""

    return problems[0] if problems else f"no weights ({' or '.join(weights)})"


class Kind(NamedTuple):
    """A kind of companion."""

    name: str  # its key in configs/companions
    words: str  # its name in messages
    how: str  # how to get one
    # patterns of its weight files, best first; empty for a single file
    weights: tuple[str, ...] = ()


_HEADS = "`python -m tools.heads {}` trains one"
_DRAFT = "name a small model of the same vocabulary"
# by the method's setting
KINDS = {
    "heads_path": Kind("medusa", "Medusa heads", _HEADS.format("medusa"), medusa.WEIGHTS),
    "hydra_path": Kind("hydra", "Hydra heads", UNTRAINED, hydra.WEIGHTS),
    "head_path": Kind("eagle", "EAGLE head", _HEADS.format("eagle"), eagle.WEIGHTS),
    "eagle3_path": Kind("eagle3", "EAGLE-3 head", UNTRAINED, eagle.WEIGHTS),
    "draft_path": Kind("draft", "draft model", _DRAFT, (SAFETENSORS,)),
    "datastore_path": Kind("datastore", "datastore", "`python -m tools.datastore` builds one"),
}


def missing_companion(method: dict[str, Any], model: str) -> str:
    """Say which companion a method lacks, by its settings and the model's name; empty if none.

    Fetches nothing.
    """
    for key in KINDS.keys() & method.keys():
        kind = KINDS[key]
        value = method[key]
        if value is None:
            return f"no {kind.words} for {model} ({kind.how}; companions.{kind.name}=PATH names it)"
        path = str(value)
        if located(path).exists():
            continue
        on_hub = bool(kind.weights) and is_name(path)
        if on_hub and (local_snapshot(path, kind.weights) or is_reachable()):
            continue
        reason = f"no such {'folder' if kind.weights else 'file'}"
        reason += f", and {constants.ENDPOINT} is not in reach" if on_hub else ""
        return f"no {kind.words} for {model} (method.{key}={value}: {reason}; {kind.how})"

    return ""


def fetch_companions(method: dict[str, Any], model: str) -> None:
    """Fetch a method's companions from the hub.

    Raises UserError if one is missing or lacks weights.
    """
    if why := missing_companion(method, model):
        raise UserError(f"{method['name']}: not available: {why}")
    for key in KINDS.keys() & method.keys():
        path = path_of(key, str(method[key]))
        weights = KINDS[key].weights
        lacking = missing_weights(path, weights) if weights else ""
        if lacking:
            raise UserError(f"{path}: {lacking}")


def path_of(key: str, value: str) -> Path:
    """Return the path of a method's setting.

    It is a file or folder, or the snapshot of a hub name, fetched if needed.

    Raises:
        UserError: a hub name that cannot be fetched.
    """
    path = located(value)
    from_hub = key in KINDS and KINDS[key].weights and is_name(value)
    if path.exists() or not from_hub:
        return path
    return fetch_snapshot(value, KINDS[key].weights)
