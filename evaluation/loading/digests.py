"""Digests of the files that decide answers, as a path does not identify its contents.

The hash of a large file is cached by its path, size, times and inode; a replaced file is hashed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from model.errors import UserError
from model.files import ROOT, write_json

from ..records.rows import read_object

CACHE = ROOT / "data/.digests"
LARGE = 1 << 20  # bytes; smaller files are hashed each time, which is as fast as reading the cache
SETTLED = 2_000_000_000  # ns since the last change of a file after which another one shows in its times

CONFIG = ("config.json", "generation_config.json", "adapter_config.json", "*.py")
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.jinja"),
    *("additional_chat_templates/*", "vocab*", "encoder.json", "emoji.json", "*.txt", "*.bpe", "*.codes"),
    *("*.model", "*.tiktoken"),
)


def model_files(folder: Path, weights: Sequence[str]) -> dict[str, str]:
    """Return digests of a model's weights, configuration, and tokenizer with chat template.

    Args:
        weights: patterns of weight files, best first; the first that matches is the one that is loaded.
    """
    kind = next((pattern for pattern in weights if any(folder.glob(pattern))), weights[0])
    patterns_of = {"weights": (kind, f"{kind}.index.json"), "config": CONFIG, "tokenizer": TOKENIZER}
    return {
        name: _of_files(folder, {path for pattern in patterns for path in folder.glob(pattern)})
        for name, patterns in patterns_of.items()
    }


def sha256_of(path: Path) -> str:
    """Return the hash of a file, or of all files of a folder with their names."""
    return file_sha256(path) if path.is_file() else _of_files(path, path.rglob("*"))


def file_sha256(file: Path) -> str:
    """Return the hash of a file, from the cache if it is large and unchanged. Raises UserError if it cannot be read."""
    try:
        before = file.stat()
        cached = CACHE / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"
        if before.st_size >= LARGE and (entry := read_object(cached)).get("stat") == _identity(before):
            return str(entry["sha256"])
        settled = max(before.st_mtime_ns, before.st_ctime_ns) < time.time_ns() - SETTLED
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if before.st_size >= LARGE and settled and _identity(file.stat()) == _identity(before):
            with suppress(UserError):  # a read-only cache: hashed each time
                write_json(cached, {"file": str(file.resolve()), "stat": _identity(before), "sha256": digest})
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    return digest


def _identity(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _of_files(folder: Path, files: Iterable[Path]) -> str:
    """Return the hash of files with their names."""
    digests = [[path.relative_to(folder).as_posix(), file_sha256(path)] for path in sorted(files) if path.is_file()]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
