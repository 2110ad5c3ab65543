"""The model hub: is it in reach, which of its repositories are on this machine, and fetching one.

Its own client tries for minutes before it says that a hub is out of reach, so that is asked once and briefly. What the
client fetches it checks by size, and a file appears in a snapshot when it is whole.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from model.errors import UserError

from ..errors import one_line

SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")  # what a repository holds beside weights
_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


@cache
def in_reach(seconds: float = 5.0) -> bool:
    """Does the hub's address answer at all, whatever it says? HF_ENDPOINT, HF_HUB_OFFLINE and proxies are honoured."""
    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


def is_name(path: str) -> bool:
    """Could this be a repository's name, owner/name? Whether it is a folder is for the caller to ask first."""
    return _NAME.fullmatch(path) is not None


def held(name: str, weights: Sequence[str], revision: str | None = None) -> Path | None:
    """The repository's snapshot on this machine, if its weights are there; without network.

    Args:
        weights: patterns of weight files, the best kind first; one kind suffices.
    """
    try:
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # LocalEntryNotFoundError is both
        return None
    return None if lacks(folder, weights) else folder


def commit_of(name: str, revision: str | None = None) -> str | None:
    """The commit that a revision of a repository is now, or is in this machine's copy where the hub is out of reach.

    None where neither is to be had.
    """
    try:
        if in_reach():
            return huggingface_hub.model_info(name, revision=revision).sha
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True)).name
    except (OSError, ValueError, HfHubHTTPError):
        return None


def fetched(name: str, weights: Sequence[str], revision: str | None = None) -> Path:
    """The repository's snapshot, fetched if it is not on this machine: small files, and the best kind of weights.

    Raises:
        UserError: out of reach, no such repository, no weights of these kinds.
    """
    if folder := held(name, weights, revision):
        return folder
    if not in_reach():
        raise UserError(f"{name}: {constants.ENDPOINT} is not in reach, and this machine holds no copy")
    try:
        files = huggingface_hub.list_repo_files(name, revision=revision)
        kind = next((kind for kind in weights if any(Path(file).match(kind) for file in files)), None)
        if kind is None:
            raise UserError(f"{name}: the repository has no weights ({' or '.join(weights)})")
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=[*SMALL, kind]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UserError(f"{name}: cannot be fetched ({one_line(error)[:300]})") from None
    if why := lacks(folder, weights):
        raise UserError(f"{name}: {why}")
    return folder


def lacks(folder: Path, weights: Sequence[str]) -> str:
    """What a folder lacks of its weights, in words: every file of an index is there; empty if one kind is whole."""
    found = ""
    for kind in weights:
        files = {path.name for path in folder.glob(kind)}
        for index in folder.glob(f"{kind}.index.json"):
            try:
                files |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError):
                found = found or f"{index.name} is broken"
        broken = [why for name in sorted(files) if (why := _broken(folder / name))]
        if files and not broken:
            return ""
        found = found or "; ".join(broken[:2])
    return found or f"no weights ({' or '.join(weights)})"


def _broken(file: Path) -> str:
    """Why a file of weights is none, in words; of safetensors the header is read, which says how long the file is."""
    if not file.is_file():
        return f"{file.name} is missing"
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{file.name} is cut short or broken ({one_line(error)[:80]})"
    return ""
