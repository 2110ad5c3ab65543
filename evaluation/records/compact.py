"""Compact records: all runs of an experiment in one compressed file.

It is kept in git, without folders or links.

Each run has one JSON line (its name, metadata and summary), then one line per answer. Token ids are
kept, as audits compare them; the answers' text is not. With the same liblzma, the same runs give
the same bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from model.errors import UserError
from model.files import ROOT

from .provenance import module_command
from .rows import Row, parse_answers

FILE = "runs.jsonl.xz"
# Published fields of a run's metadata, of its configuration (the rest is in `settings`) and of an
# answer.
METADATA = (
    "settings",
    "date",
    "started",
    "device",
    "platform",
    "threads",
    "versions",
    "git",
    "circumstances",
    "label",
    "execution_used",
    "execution_why",
    "cudnn_attention",
    "questions",
    "question_hashes",
    "template_sha256",
    "vocab_size",
    "generation_config_left_out",
    "converted_from",
    "cores_busy_elsewhere",
    "draft_tree",
    "summary",
    "threads_why",
    "note",
)
CONFIG = ("start", "bench", "model")
ANSWER = ("question_id", "schema", "category", "question_sha256", "choices", "peak_memory")
_PLAIN_WORD = re.compile(r"-m|[\w.]+=[\w.,+()\[\]-]*")  # a setting and its plain values
_NAMES = ("results_dir=", "run_dir=", "name=")  # words that name the user's folders


@cache
def public_paths() -> frozenset[str]:
    """Return the paths and hub names in configs/."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "configs").rglob("*.yaml")]
    return frozenset(re.findall(r"[\w.-]+(?:/[\w.-]+)+", "\n".join(texts)))


def packed(runs: Iterable[tuple[str, dict[str, Any], Sequence[Row]]]) -> bytes:
    """Return the file's bytes for runs given as name, metadata with `summary`, and answers."""
    lines: list[str] = []
    for name, metadata, answers in runs:
        lines.append(_line({"run": published_name(name), "metadata": published(metadata)}))
        for row in answers:
            kept = _only(row, ANSWER)
            kept["choices"] = [
                choice | {"turns": [""] * len(choice["turns"])} for choice in row["choices"]
            ]
            lines.append(_line(kept))

    return lzma.compress("".join(lines).encode(), preset=9)


def unpacked(path: Path) -> Iterator[tuple[str, dict[str, Any], list[Row]]]:
    """Yield the runs of compact records: name, metadata, answers.

    Raises UserError if the file is broken.
    """
    try:
        lines = lzma.decompress(path.read_bytes()).decode().split("\n")
    except (EOFError, lzma.LZMAError) as error:
        raise UserError(
            f"{path}: not compact records, or cut short ({error}); take it from git again"
        ) from None

    begins = [i for i, line in enumerate(lines) if line.startswith('{"run":')]
    for begin, end in itertools.pairwise([*begins, len(lines)]):
        head = json.loads(lines[begin])
        rows, _ = parse_answers(lines[begin + 1 : end])
        yield head["run"], head["metadata"], list(rows.values())


def published_name(run: str) -> str:
    """Return the name under which a run is published.

    It holds the hash in its folder's name, else a hash of that name.
    """
    digest = run.rpartition("-")[2]
    if not re.fullmatch("[0-9a-f]{8}", digest):
        digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    return f"run-{digest}"


def published(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the published part of a run's metadata.

    Its command keeps only words with plain or public values.
    """
    kept = _only(metadata, METADATA)
    kept["config"] = _only(metadata.get("config", {}), CONFIG)
    kept["texts"] = False
    kept = {key: without_paths(value, key) for key, value in kept.items()}
    kept["config"].get("bench", {}).pop("url", None)

    command = module_command(metadata.get("command", []))
    words = []
    for word in command[3:]:
        is_public = _PLAIN_WORD.fullmatch(word) or word.partition("=")[2] in public_paths()
        if is_public and not word.startswith(_NAMES):
            words.append(word)
    kept["command"] = command[:3] + words if command[1:2] == ["-m"] else []
    kept["note"] = metadata.get("note", "")
    return kept


def _only(values: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in keys}


def without_paths(value: Any, key: str = "") -> Any:
    """Return JSON data whose paths are cut to their last part, except paths in configs/."""
    if isinstance(value, dict):
        return {key: without_paths(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str) or value in public_paths():
        return value
    if key == "execution_why":  # a sentence, which is cut before the first path
        return re.split(r"\S*[/\\]", value)[0].strip()
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1]


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
