"""The model hub: find repositories on this machine, fetch one.

The hub's client checks sizes, and a file appears in a snapshot only when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from model import hub
from model.errors import UserError

from ..errors import one_line

SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")  # the files of a repository that are not weights
_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


is_reachable = cache(hub.is_reachable)  # once a command


def is_name(path: str) -> bool:
    """True if this could be a repository's name, owner/name; the caller checks first that it is no folder."""
    return _NAME.fullmatch(path) is not None


def local_snapshot(name: str, weights: Sequence[str], revision: str | None = None) -> Path | None:
    """Return the repository's snapshot on this machine; None if its weights are missing. Uses no network.

    Args:
        weights: patterns of weight files, best first; one kind suffices.
    """
    try:
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # LocalEntryNotFoundError is both
        return None
    return None if missing_weights(folder, weights) else folder


def commit_of(name: str, revision: str | None = None) -> str | None:
    """Return the current commit of a revision, or of this machine's copy if the hub is unreachable; None if neither."""
    try:
        if is_reachable():
            return huggingface_hub.model_info(name, revision=revision).sha
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True)).name
    except (OSError, ValueError, HfHubHTTPError):
        return None


def fetch_snapshot(name: str, weights: Sequence[str], revision: str | None = None) -> Path:
    """Return the repository's snapshot, fetched if needed: small files, and the best kind of weights.

    Raises:
        UserError: unreachable, no such repository, no weights of these kinds.
    """
    if folder := local_snapshot(name, weights, revision):
        return folder
    if not is_reachable():
        raise UserError(f"{name}: {constants.ENDPOINT} is not in reach, and this machine holds no copy")
    try:
        files = huggingface_hub.list_repo_files(name, revision=revision)
        kind = next((kind for kind in weights if any(Path(file).match(kind) for file in files)), None)
        if kind is None:
            raise UserError(f"{name}: the repository has no weights ({' or '.join(weights)})")
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=[*SMALL, kind]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UserError(f"{name}: cannot be fetched ({one_line(error)[:300]})") from None
    if why := missing_weights(folder, weights):
        raise UserError(f"{name}: {why}")
    return folder


def missing_weights(folder: Path, weights: Sequence[str]) -> str:
    """Name the missing or broken weights of a folder; empty if one kind is complete, with every file of its index."""
    problem = ""
    for kind in weights:
        files = {path.name for path in folder.glob(kind)}
        for index in folder.glob(f"{kind}.index.json"):
            try:
                files |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError):
                problem = problem or f"{index.name} is broken"
        broken = [why for name in sorted(files) if (why := _broken(folder / name))]
        if files and not broken:
            return ""
        problem = problem or "; ".join(broken[:2])
    return problem or f"no weights ({' or '.join(weights)})"


def _broken(file: Path) -> str:
    """Say why a weight file is broken, or return an empty text. A safetensors header gives the file's length."""
    if not file.is_file():
        return f"{file.name} is missing"
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{file.name} is cut short or broken ({one_line(error)[:80]})"
    return ""
