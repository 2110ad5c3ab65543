"""Compact records: all runs of an experiment in one compressed file.

It is kept in git, without folders or links.

Each run has one JSON line (its name, metadata and summary), then one line per answer, with the
fields listed here. Token ids are kept, as audits compare them; the answers' text is not. With the
same liblzma, the same runs give the same bytes.
"""

from __future__ import annotations

import hashlib
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
from .rows import Row, parse_answers, parsed

FILE = "runs.jsonl.xz"
# Published fields of a run's metadata, of its configuration (the rest is in `settings`), of an
# answer and of a choice.
METADATA = (
    "settings",
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
CHOICE = (
    "index",
    "turns",
    "decoding_steps",
    "new_tokens",
    "wall_time",
    "accept_lengths",
    "prompt_tokens",
    "prompt_time",
    "prefill_time",
    "decode_time",
    "setup_time",
    "forwards",
    "stop",
    "output_ids",
    "repeated_3grams",
    "step_nodes",
    "step_paths",
    "step_sources",
    "step_us",
    "step_batch",
    "phase_time",
    "first_tokens",
    "first_token_time",
    "engine_means",
    "ids_remade",
)
# fields of prose, which are cut before the first path
SENTENCES = ("execution_why", "not_available")
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
            choices = []
            for choice in row["choices"]:
                no_texts = [""] * len(choice["turns"])
                choices.append(_only(choice, CHOICE) | {"turns": no_texts})
            lines.append(_line(_only(row, ANSWER) | {"choices": choices}))

    return lzma.compress("".join(lines).encode(), preset=9)


def unpacked(path: Path) -> Iterator[tuple[str, dict[str, Any], list[Row]]]:
    """Yield the runs of compact records: name, metadata, answers.

    Raises UserError if the file is broken.
    """
    try:
        lines = lzma.decompress(path.read_bytes()).decode().split("\n")
        begins = [i for i, line in enumerate(lines) if line.startswith('{"run":')]
        for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
            head = parsed(lines[begin])
            rows, damage = parse_answers(lines[begin + 1 : end])
            if damage:
                raise UserError(f"{path}: {head['run']}: {damage}")
            yield head["run"], head["metadata"], list(rows.values())
    except UserError:
        raise
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError) as error:
        raise UserError(
            f"{path}: not compact records, or cut short ({error}); take it from git again"
        ) from None


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
    config = _only(metadata.get("config", {}), CONFIG)
    if "bench" in config:
        bench = config["bench"]
        config["bench"] = {key: bench[key] for key in bench if key != "url"}

    command = module_command(metadata.get("command") or [])
    words = []
    for word in command[3:]:
        is_public = _PLAIN_WORD.fullmatch(word) or word.partition("=")[2] in public_paths()
        if is_public and not word.startswith(_NAMES):
            words.append(word)

    kept: dict[str, Any] = without_paths(
        _only(metadata, METADATA) | {"config": config, "texts": False}
    )
    # on the hub, so the name is public
    if "commit" in (metadata["settings"]["model"].get("files") or {}):
        kept["config"]["model"]["path"] = config["model"]["path"]
    return kept | {
        "command": command[:3] + words if command[1:2] == ["-m"] else [],
        "note": metadata.get("note", ""),
    }


def _only(values: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in keys}


def without_paths(value: Any, key: str = "") -> Any:
    """Return JSON data whose paths are cut to their last part, except paths in configs/."""
    if isinstance(value, dict):
        return {key: without_paths(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str) or not re.search(r"[/\\]", value) or value in public_paths():
        return value
    if key in SENTENCES:
        return re.split(r"\S*[/\\]", value)[0].strip()
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1]


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
