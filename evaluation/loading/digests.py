"""What stands in files that decide answers, as digests: a path says nothing of what lies there now.

A large file is hashed once. What was found is kept by its path, size, times and inode: replaced, it is hashed again.
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
LARGE = 1 << 20  # bytes; smaller files are hashed each time, which takes as long as reading what is kept
SETTLED = 2_000_000_000  # ns since a file was last changed, from which another change would show in its times

CONFIG = ("config.json", "generation_config.json", "adapter_config.json", "*.py")
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.jinja"),
    *("additional_chat_templates/*", "vocab*", "encoder.json", "emoji.json", "*.txt", "*.bpe", "*.codes"),
    *("*.model", "*.tiktoken"),
)


def model_files(folder: Path, weights: Sequence[str]) -> dict[str, str]:
    """Digests of a model's folder: of its weights, its configuration, and its tokenizer with the chat template.

    Args:
        weights: patterns of weight files, the best kind first; the first kind that is there is the one that is read.
    """
    kind = next((pattern for pattern in weights if any(folder.glob(pattern))), weights[0])
    parts = {"weights": (kind, f"{kind}.index.json"), "config": CONFIG, "tokenizer": TOKENIZER}
    return {
        name: _of_files(folder, {path for pattern in patterns for path in folder.glob(pattern)})
        for name, patterns in parts.items()
    }


def sha256_of(path: Path) -> str:
    """Of a file, or of all files of a folder with their names."""
    return file_sha256(path) if path.is_file() else _of_files(path, path.rglob("*"))


def file_sha256(file: Path) -> str:
    """Of a file's bytes, from what is kept where the file is large and the same as when it was hashed.

    Raises:
        UserError: it cannot be read.
    """
    try:
        before = file.stat()
        kept = CACHE / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"
        if before.st_size >= LARGE and (found := read_object(kept)).get("stat") == _marks(before):
            return str(found["sha256"])
        settled = max(before.st_mtime_ns, before.st_ctime_ns) < time.time_ns() - SETTLED
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if before.st_size >= LARGE and settled and _marks(file.stat()) == _marks(before):
            with suppress(UserError):  # where nothing can be written it is hashed each time
                write_json(kept, {"file": str(file.resolve()), "stat": _marks(before), "sha256": digest})
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    return digest


def _marks(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _of_files(folder: Path, files: Iterable[Path]) -> str:
    """Of these files with their names; of none, of nothing."""
    found = [[path.relative_to(folder).as_posix(), file_sha256(path)] for path in sorted(files) if path.is_file()]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
