"""Provenance of a run: versions, device, and digests of code and files."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from model import __version__
from model.errors import UserError
from model.files import ROOT, processor, weight_files

CONVERTED = ROOT / "data/.models"  # GGUF files as safetensors, in folders NAME-SHA256-REVISION
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "fschat",
    "accelerate",
    "hydra-core",
    "numba",
    "pandas",
    "matplotlib",
)
ANSWERING = (
    "model/**/*.py",
    "evaluation/configuration/*.py",
    "evaluation/loading/*.py",
    "evaluation/records/*.py",
    "evaluation/running/*.py",
)
CONFIG = ("config.json", "generation_config.json", "adapter_config.json", "*.py")
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.jinja",
    "additional_chat_templates/*",
    "vocab*",
    "encoder.json",
    "emoji.json",
    "*.txt",
    "*.bpe",
    "*.codes",
    "*.model",
    "*.tiktoken",
)


def describe_device(device: torch.device, threads: int | None = None) -> str:
    """Name the device as printed above every table; `threads` of a CPU are by default torch's."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if device.type == "mps":
        return f"Apple {platform.machine()} GPU (MPS)"
    threads = threads or torch.get_num_threads()
    return f"{processor() or platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def versions(*more: str) -> dict[str, str]:
    installed = {"python": platform.python_version(), "token-recycling": __version__}
    for package in (*PACKAGES, *more):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "not installed"

    return installed


def git_state() -> dict[str, Any]:
    """Return the commit and whether files other than records differ from it; {} without git."""

    def git(*words: str) -> str:
        process = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
        return process.stdout.strip()

    try:
        # contributed records replace older ones
        changed = git("status", "--porcelain", "--", ".", ":!results")
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return {}


def module_command(argv: Sequence[str]) -> list[str]:
    """Return a recorded command as it is typed, with `python -m evaluation.NAME` for its path."""
    for i, part in enumerate(map(Path, argv[:2])):
        if part.suffix == ".py" and part.parent.name == "evaluation":
            return ["python", "-m", f"evaluation.{part.stem}", *argv[i + 1 :]]
    return list(argv)


def commit(run: dict[str, Any]) -> str:
    git = run.get("git") or {}
    changed = ", with uncommitted changes" if git.get("modified") else ""
    return f"{git['commit'][:12]}{changed}" if git.get("commit") else ""


@cache
def sources_sha256() -> str:
    return _of_files(ROOT, ANSWERING)


def model_files(folder: Path, weights: Sequence[str]) -> dict[str, str]:
    """Return digests of a model's weights (as of `weight_files`), configuration, and tokenizer."""
    kind = next((kind for kind in weights if weight_files(folder, (kind,))), weights[0])
    names = [path.name for path in weight_files(folder, (kind,))]
    patterns_of = {
        "weights": (*names, f"{kind}.index.json"),
        "config": CONFIG,
        "tokenizer": TOKENIZER,
    }
    return {name: _of_files(folder, patterns) for name, patterns in patterns_of.items()}


def sha256_of(path: Path) -> str:
    """Return the hash of a file, or of all files of a folder with their names.

    A file is read again if its size, times or inode change. Raises UserError if it cannot be.
    """
    if path.is_dir():
        return _of_files(path, ["**/*"])
    try:
        stat = path.stat()
        return _of_file(
            path.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
        )
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


@cache
def _of_file(path: Path, *version: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _of_files(folder: Path, patterns: Iterable[str]) -> str:
    paths = set(chain.from_iterable(map(folder.glob, patterns)))
    files = [path for path in sorted(paths) if path.is_file()]
    digests = [[path.relative_to(folder).as_posix(), sha256_of(path)] for path in files]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def circumstances(device: str, linear: str, *packages: str) -> dict[str, Any]:
    """Collect what decides a run's speed or rounding but is not a setting of the run.

    Args:
        linear: half, onednn, fused or torch, by rows if two are used.
        packages: further packages whose versions matter.
    """
    return {
        "device": device,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "versions": versions(*packages),
        "linear": linear,
        "sources_sha256": sources_sha256(),
    }


def without_passwords(value: Any) -> Any:
    """Return a JSON value with users and passwords removed from its URLs."""
    return json.loads(re.sub(r'(?<=://)[^/\s"]*@', "", json.dumps(value)))


def collect(settings: dict[str, Any], now: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "settings": settings,
        "command": without_passwords([sys.executable, *sys.argv]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **{key: now[key] for key in ("device", "platform", "threads", "versions")},
        "git": git_state(),
        "circumstances": now,
        **extra,
    }
