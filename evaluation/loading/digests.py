"""Digests of the files that decide answers, as a path does not identify its contents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from model.errors import UserError

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
    """Return the hash of a file; a file that is unchanged is read once a process. Raises UserError if it cannot be."""
    try:
        stat = file.stat()
        return _hash(file, (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


@lru_cache(maxsize=1024)
def _hash(file: Path, identity: tuple[int, ...]) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _of_files(folder: Path, files: Iterable[Path]) -> str:
    """Return the hash of files with their names."""
    digests = [[path.relative_to(folder).as_posix(), file_sha256(path)] for path in sorted(files) if path.is_file()]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
