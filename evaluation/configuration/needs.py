"""Find and fetch what the jobs of a command line need: models, heads, draft models, datastores, benches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from model.errors import UserError
from model.files import located

from ..errors import one_line
from ..loading import gguf, hub
from ..loading.bench import bench_file, load_bench
from ..loading.models import locate, weight_patterns
from .companions import KINDS, missing_companion, path_of
from .config import check_groups

KNOWN, FETCHED, MISSING = "known", "fetched", "missing"


@dataclass(frozen=True)
class Need:
    """Something that jobs need: `find` returns its local path or None; `fetch` fetches it and may raise UserError."""

    words: str
    find: Callable[[], Path | None]
    fetch: Callable[[], Path]
    published: bool = True


def needs(configurations: Iterable[DictConfig]) -> list[Need]:
    """Return what the jobs need, each once, models first."""
    by_words: dict[str, Need] = {}
    for cfg in configurations:
        parts = ("model", "method", "bench")
        config: Any = {key: OmegaConf.to_container(cfg[key], resolve=True, throw_on_missing=True) for key in parts}
        check_groups(config)
        for need in (_model(config["model"]), *_companions(config), _bench(config["bench"])):
            by_words.setdefault(need.words, need)
    order = ["model", *(kind.words for kind in KINDS.values()), "bench"]
    return [need for kind in order for need in by_words.values() if need.words.startswith(f"{kind} ")]


def _model(model: dict[str, Any]) -> Need:
    path, revision, kinds = str(model["path"]), model["revision"], weight_patterns(model["allow_pickle"])
    local = located(path)
    is_gguf = gguf.is_gguf(local)

    def find() -> Path | None:
        if is_gguf:
            return gguf.converted_folder(local)
        folder = Path(locate(path, model["allow_pickle"]))
        if not folder.is_dir():
            return hub.local_snapshot(path, kinds, revision)
        if why := hub.missing_weights(folder, kinds):
            raise UserError(why)
        return folder

    def fetch() -> Path:
        return Path(locate(path, model["allow_pickle"])) if is_gguf else hub.fetch_snapshot(path, kinds, revision)

    return Need(f"model {path}", find, fetch)


def _companions(config: dict[str, Any]) -> Iterable[Need]:
    method, model = config["method"], str(config["model"]["name"])
    for key, kind in KINDS.items():
        if key not in method:
            continue
        value, why = method[key], missing_companion({key: method[key]}, model)

        def find(key: str = key, value: Any = value) -> Path | None:
            path, kinds = located(str(value)), KINDS[key].weights
            if value is None or not path.exists():
                return hub.local_snapshot(value, kinds) if value and kinds and hub.is_name(value) else None
            if kinds and (missing := hub.missing_weights(path, kinds)):
                raise UserError(missing)
            return path

        def fetch(key: str = key, value: Any = value, why: str = why) -> Path:
            if why:
                raise UserError(why)
            return path_of(key, value)

        yield Need(f"{kind.words} {value or f'for {model}'}", find, fetch, published=value is not None)


def _bench(bench: dict[str, Any]) -> Need:
    file = bench_file(str(bench["path"]), bench["url"])

    def fetch() -> Path:
        load_bench(**bench)
        return file

    return Need(f"bench {bench['name']}", lambda: fetch() if file.exists() else None, fetch)


def prefetch(wanted: Iterable[Need]) -> bool:
    """Fetch what is missing and print a line for each. Returns False if something published is still missing."""
    complete = True
    for need in wanted:
        try:
            state, path = KNOWN, need.find()
            if path is None:
                state, path = FETCHED, need.fetch()
            print(f"{state:8} {_readable(_size(path)):>9}  {need.words}", flush=True)
        except UserError as error:
            print(f"{MISSING:8} {'':9}  {need.words}: {one_line(error)}", flush=True)
            complete = complete and not need.published
    return complete


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
