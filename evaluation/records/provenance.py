"""What ran on what: written before the first question, so that every figure can be traced."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from model import __version__
from model.files import ROOT

CONVERTED = ROOT / "data/.models"  # GGUF files as safetensors, in folders NAME-SHA256-REVISION
PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "fschat", "accelerate"),
    *("hydra-core", "numba", "pandas", "matplotlib"),
)
ANSWERING = ("model", "evaluation/configuration", "evaluation/loading", "evaluation/records", "evaluation/running")


def describe_device(device: torch.device, threads: int | None = None) -> str:
    """Name the device as it stands above every table; a CPU with its threads, by default torch's."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if device.type == "mps":
        return f"Apple {platform.machine()} GPU (MPS)"
    threads = threads or torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as handle:
            names = [line.split(":", 1)[1].strip() for line in handle if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, of this project, of the main packages, and of others that a run uses."""
    installed = {"python": platform.python_version(), "token-recycling": __version__}
    for package in (*PACKAGES, *more):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def git_state() -> dict[str, Any]:
    """Return the commit and whether files differ from it; empty outside a checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def module_command(argv: Sequence[str]) -> list[str]:
    """Return a recorded command as it is typed: `python -m evaluation.NAME ...` for a module of this repository."""
    for i, part in enumerate(map(Path, argv[:2])):
        if part.suffix == ".py" and part.parent.name == "evaluation":
            return ["python", "-m", f"evaluation.{part.stem}", *argv[i + 1 :]]
    return list(argv)


def commit(run: dict[str, Any]) -> str:
    """Say at which commit a run's code was, from its metadata; empty if it is not known."""
    git = run.get("git") or {}
    changed = ", with uncommitted changes" if git.get("modified") else ""
    return f"{git['commit'][:12]}{changed}" if git.get("commit") else ""


@lru_cache(maxsize=1)
def sources_sha256() -> str:
    """Hash the code that answers and measures: every Python file of these folders, with its name; not the page's."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in ANSWERING for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def flat(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by their names as a command line has them: method.k for {"method": {"k": ...}}."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def circumstances(device: str, linear: str, *packages: str) -> dict[str, Any]:
    """Collect what decides a run's speed or its rounding and is no setting of it.

    Args:
        device: in words, the number of threads of a CPU included.
        linear: half, onednn, fused or torch; where nobody says which, the free memory decides.
        packages: those of which the version counts, next to those of every run.
    """
    return {
        "device": device,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "versions": versions(*packages),
        "linear": linear,
        "sources_sha256": sources_sha256(),
    }


def collect(settings: dict[str, Any], now: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Collect the metadata of a run: settings, which decide the output, and circumstances, which decide the speed."""
    return {
        "settings": settings,
        "command": [sys.executable, *sys.argv],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **{key: now[key] for key in ("device", "platform", "threads", "versions")},
        "git": git_state(),
        "circumstances": now,
        **extra,
    }
