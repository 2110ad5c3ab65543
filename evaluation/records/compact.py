"""Compact records: all runs of an experiment in one compressed file, which is kept in git.

Each run has one JSON line (its name, metadata and summary), then one line per answer. Token ids are
kept, as audits compare them; the answers' text is not.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from model.errors import UserError

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
_NAMES = ("results_dir=", "run_dir=", "name=")  # words that name the user's folders
_ADDRESS = re.compile(r"[\w+.-]+://\S*")
# where a path begins at a root, at a home or above this folder
_BEGIN = r"(?:~[\w.-]*|[A-Za-z]:|\.\.?)?[/\\](?=\S)"
_IN_TEXT = re.compile(rf"(?<![\w./\\~]){_BEGIN}")
# the folders of a path that is a whole value, perhaps of a setting
_PATH = re.compile(rf"([\w.]+=)?{_BEGIN}(?:.*[/\\])?", re.DOTALL)


def packed(runs: Iterable[tuple[str, dict[str, Any], Sequence[Row]]]) -> bytes:
    lines: list[str] = []
    for name, metadata, answers in runs:
        lines.append(_line({"run": published_name(name), "metadata": published(metadata)}))
        for row in answers:
            without_text = [
                choice | {"turns": [""] * len(choice["turns"])} for choice in row["choices"]
            ]
            lines.append(_line(_only(row, ANSWER) | {"choices": without_text}))

    return lzma.compress("".join(lines).encode(), preset=9)


def unpacked(path: Path) -> Iterator[tuple[str, dict[str, Any], list[Row]]]:
    """Yield each run's name, metadata and answers. Raises UserError if the file is broken."""
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
    """Return the name under which a run is published, with its folder's hash."""
    digest = run.rpartition("-")[2]
    if not re.fullmatch("[0-9a-f]{8}", digest):
        digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    return f"run-{digest}"


def published(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the published part of a run's metadata.

    Paths that begin at a root, at a home or above this folder lose their folders, texts end before
    one, and addresses are left out.
    """
    config = _only(metadata.get("config", {}), CONFIG)
    config["bench"] = {key: v for key, v in config.get("bench", {}).items() if key != "url"}
    command = [
        word
        for word in module_command(metadata.get("command", []))
        if "://" not in word and not word.startswith(_NAMES)
    ]
    parts = {"note": ""} | _only(metadata, METADATA) | {"config": config, "command": command}
    return {key: without_folders(value) for key, value in parts.items()}


def without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    text = _ADDRESS.sub("", value)
    path = _PATH.match(text)
    if path:
        return (path[1] or "") + text[path.end() :]
    return _IN_TEXT.split(text)[0]  # a path in a text may have blanks: its end is not known


def _only(values: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in keys}


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
