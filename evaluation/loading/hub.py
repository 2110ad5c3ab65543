"""Repositories of the model hub: find them on this machine, fetch one.

The hub's client checks sizes, and a file appears in a snapshot only when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from model.errors import UserError, one_line
from model.pretrained import is_reachable as is_reachable

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
