"""Files, whole or not at all; the weights of a folder; times measured once."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import UserError, one_line, visible

POINTER = b"version https://git-lfs"  # how a file begins that git-lfs has not fetched
PARTIAL = ".*.part"  # pattern of the files that killed writers leave next to their target


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` at the end; a failure leaves the old file."""
    if not path.name:
        raise UserError(f"{str(path)!r}: names no file")
    partial = path.with_name(f".{path.name[:80]}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        if partial.exists():
            partial.unlink()


def write_bytes(path: Path, data: bytes) -> None:
    with replaced(path) as partial:
        partial.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, visible(text).encode("utf-8", errors="replace"))


def save_state(state: dict[str, Tensor], path: Path) -> None:
    try:
        with replaced(path) as partial:
            save_file({name: tensor.contiguous().cpu() for name, tensor in state.items()}, partial)
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be written ({error})") from None


def load_state(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"start: no saved state at {path}") from None
    # a folder, no access, a type that torch does not have
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(f"start: {path} is not a saved state ({error})") from None


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def weight_files(
    folder: Path, kinds: Sequence[str] = ("model.safetensors", "pytorch_model.bin")
) -> list[Path]:
    """Return the weight files of a folder that transformers reads.

    Args:
        kinds: names, best first, each of one file or of one that NAME.index.json splits.
    """
    for single in kinds:
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return [folder / single]
        if index.is_file():
            try:
                shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return [folder / shard for shard in sorted(shards)]
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise UserError(f"{index}: is broken ({error})") from None
    return []


def unusable(folder: Path) -> str:
    """Say why a folder is no checkpoint yet; empty if it may be one."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(POINTER):
            return f"{path.name} is a pointer of git-lfs; run `git lfs pull` in {folder}"
    if (folder / "adapter_config.json").is_file():
        return (
            "an adapter (adapter_config.json): merge it into its model, or load it in peft and give"
            " the model to Decoder"
        )
    return ""


def missing_weights(folder: Path, kinds: Sequence[str]) -> str:
    """Name the missing or broken weights of a folder; empty if they are complete."""
    try:
        files = weight_files(folder, kinds)
    except UserError as error:
        return str(error)
    for path in files:
        try:
            if path.suffix == ".safetensors":  # whose header gives the file's length
                with safe_open(path, "pt"):
                    pass
            else:
                path.stat()
        except FileNotFoundError:
            return f"{path.name} is missing"
        except (OSError, SafetensorError) as error:
            return f"{path.name} is cut short or broken ({one_line(error)[:80]})"

    return "" if files or not kinds else f"no weights ({' or '.join(kinds)})"


ROOT = Path(__file__).resolve().parent.parent
# how much more than the lower quartile the median is at most if no other process disturbs
CALM = 1.3


def local_path(path: str | Path) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib raises where nobody has the name


def located(path: str | Path) -> Path:
    """Return a path that exists or is absolute; others are relative to the repository."""
    local = local_path(path)
    return local if local.exists() or local.is_absolute() else ROOT / local


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:  # not Linux
        names = [platform.processor()]
    return next(iter(names), "")


def quartiles(runs: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], bool]:
    """Return lower quartiles in microseconds; False if other processes disturbed a run."""
    times = dict[str, float]()
    calm = True
    for name, seconds in runs.items():
        quartile, median, _ = statistics.quantiles(seconds)
        times[name] = round(1e6 * quartile, 1)
        calm &= median < CALM * quartile
    return times, calm


def measured_once(
    conditions: Any, measure: Callable[[], tuple[Any, bool]], names: Sequence[str], size: int
) -> Any:
    """Return times measured under these conditions: kept in the user's cache, or measured now.

    Args:
        measure: returns lists of `size` numbers by name; False if other processes disturbed it.
    """
    home = os.environ.get("HOME") or tempfile.gettempdir()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache", "token_recycling")
    path = folder / f"{hashlib.sha256(repr(conditions).encode()).hexdigest()[:16]}.json"
    try:
        saved = json.loads(path.read_text())
        times = {name: [float(number) for number in saved[name]] for name in names}
        if all(len(numbers) == size for numbers in times.values()):
            return times
    except (OSError, ValueError, TypeError, LookupError):
        pass  # there are no times yet, or the file is broken
    measured, calm = measure()
    if calm:
        # if it cannot be written, the next process measures again
        with suppress(UserError, OSError):
            write_json(path, measured)
    return measured
