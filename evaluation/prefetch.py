"""python -m evaluation.prefetch experiment=NAME [k=v ...]: fetch and check what an experiment needs, before it runs.

Models, heads, draft models, datastores and benches of exactly the jobs that `evaluation.run` would start with the same
arguments: for nodes without a network, run it where there is one. A line for each: `known` was here and
complete, `fetched` was not, `missing` says why. A null in configs/companions is reported without an error: its jobs are
left out. Exit code 2 if something else is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from model.errors import UserError
from model.files import located

from .configuration.companions import KINDS, Kind, local_companion, missing_companion, path_of
from .configuration.config import check_groups
from .configuration.jobs import compose
from .errors import one_line, user_errors
from .loading import gguf, hub
from .loading.bench import bench_file, load_bench
from .loading.models import locate, weight_patterns


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
        groups = ("model", "method", "bench")
        config: Any = {key: OmegaConf.to_container(cfg[key], resolve=True, throw_on_missing=True) for key in groups}
        check_groups(config)
        method = config["method"]
        companions = [_companion(key, kind, method[key], config) for key, kind in KINDS.items() if key in method]
        for need in (_model(config["model"]), *companions, _bench(config["bench"])):
            by_words.setdefault(need.words, need)
    order = ["model", *(kind.words for kind in KINDS.values()), "bench"]
    return [need for kind in order for need in by_words.values() if need.words.startswith(f"{kind} ")]


def _model(model: dict[str, Any]) -> Need:
    path, revision, weights = str(model["path"]), model["revision"], weight_patterns(model["allow_pickle"])
    local = located(path)
    is_gguf = gguf.is_gguf(local)

    def find() -> Path | None:
        if is_gguf:
            return gguf.converted_folder(local)
        folder = Path(locate(path, model["allow_pickle"]))
        return _whole(folder, weights) if folder.is_dir() else hub.local_snapshot(path, weights, revision)

    def fetch() -> Path:
        return Path(locate(path, model["allow_pickle"])) if is_gguf else hub.fetch_snapshot(path, weights, revision)

    return Need(f"model {path}", find, fetch)


def _companion(key: str, kind: Kind, value: Any, config: dict[str, Any]) -> Need:
    model = str(config["model"]["name"])
    why = missing_companion({key: value}, model)

    def find() -> Path | None:
        path = local_companion(key, value)
        return path if path is None or not kind.weights else _whole(path, kind.weights)

    def fetch() -> Path:
        if why:
            raise UserError(why)
        return path_of(key, value)

    return Need(f"{kind.words} {value or f'for {model}'}", find, fetch, published=value is not None)


def _whole(folder: Path, weights: tuple[str, ...]) -> Path:
    if why := hub.missing_weights(folder, weights):
        raise UserError(why)
    return folder


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
            state, path = "known", need.find()
            if path is None:
                state, path = "fetched", need.fetch()
            print(f"{state:8} {_size(path):>9}  {need.words}", flush=True)
        except UserError as error:
            print(f"{'missing':8} {'':9}  {need.words}: {one_line(error)}", flush=True)
            complete = complete and not need.published
    return complete


def _size(path: Path) -> str:
    """Return the size of a file, or of all files of a folder, in words."""
    files = [path] if path.is_file() else path.rglob("*")
    size: float = sum(file.stat().st_size for file in files if file.is_file())
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.prefetch", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as for evaluation.run: experiment=NAME, model=..., ...")
    parser.add_argument("-m", "--multirun", action="store_true", help="a sweep without an experiment, as there")
    parser.add_argument("--config-dir", help="a further folder of configs, as there")
    given = parser.parse_intermixed_args()
    with user_errors():
        composed = compose(given.overrides, multirun=given.multirun, config_dir=given.config_dir)
        if not prefetch(needs(job.config for job in composed.jobs)):
            sys.exit(2)


if __name__ == "__main__":
    main()
