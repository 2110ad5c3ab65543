"""What the jobs of a command line need (models, heads, draft models, datastores, benches): is it here? Fetching it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import HydraContext
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from model.errors import UserError
from model.files import ROOT, located

from ..errors import one_line
from ..loading import gguf, hub
from ..loading.bench import bench_file, load_bench
from ..loading.models import locate, weights
from .companions import KINDS, lacking, where
from .config import check_groups
from .jobs import listed

KNOWN, FETCHED, MISSING = "known", "fetched", "missing"


@dataclass(frozen=True)
class Need:
    """Something that jobs need: `here` is where it lies already, or None; `get` fetches it and raises UserError."""

    words: str
    here: Callable[[], Path | None]
    get: Callable[[], Path]
    published: bool = True


def composed(arguments: list[str], *, multirun: bool = False, config_dir: str | None = None) -> list[DictConfig]:
    """The configurations of the jobs that these arguments start, as the sweeper makes them. Nothing is written."""
    extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    extra += ["hydra.mode=MULTIRUN"] if multirun else []
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        engine = GlobalHydra.instance().hydra
        assert engine is not None
        arguments = listed([*arguments, "-m"] if multirun else arguments)[: len(arguments)]
        master = engine.compose_config("config", [*arguments, *extra], RunMode.MULTIRUN, from_shell=False)
        if master.hydra.mode != RunMode.MULTIRUN:
            return [engine.compose_config("config", [*arguments, *extra], RunMode.RUN, from_shell=False)]
        sweeper = instantiate(master.hydra.sweeper)
        sweeper.config, sweeper.hydra_context = master, HydraContext(engine.config_loader, Callbacks())
        return list(sweeper.configurations(list(master.hydra.overrides.task)))


def needs(configurations: Iterable[DictConfig]) -> list[Need]:
    """What the jobs need, each once, models first."""
    found: dict[str, Need] = {}
    for cfg in configurations:
        parts = ("model", "method", "bench")
        config: Any = {key: OmegaConf.to_container(cfg[key], resolve=True, throw_on_missing=True) for key in parts}
        check_groups(config)
        for need in (_model(config["model"]), *_companions(config), _bench(config["bench"])):
            found.setdefault(need.words, need)
    order = ["model", *(kind.words for kind in KINDS.values()), "bench"]
    return [need for kind in order for need in found.values() if need.words.startswith(f"{kind} ")]


def _model(model: dict[str, Any]) -> Need:
    path, revision, kinds = str(model["path"]), model["revision"], weights(model["allow_pickle"])
    local = located(path)
    packed = gguf.stands_for_one(local)

    def here() -> Path | None:
        if packed:
            return gguf.held(local)
        folder = Path(locate(path, model["allow_pickle"]))
        if not folder.is_dir():
            return hub.held(path, kinds, revision)
        if why := hub.lacks(folder, kinds):
            raise UserError(why)
        return folder

    def get() -> Path:
        return Path(locate(path, model["allow_pickle"])) if packed else hub.fetched(path, kinds, revision)

    return Need(f"model {path}", here, get)


def _companions(config: dict[str, Any]) -> Iterable[Need]:
    method, model = config["method"], str(config["model"]["name"])
    for key, kind in KINDS.items():
        if key not in method or (method[key] is None and kind.optional):
            continue
        value, why = method[key], lacking({key: method[key]}, model)

        def here(key: str = key, value: Any = value) -> Path | None:
            path, kinds = located(str(value)), KINDS[key].weights
            if value is None or not path.exists():
                return hub.held(value, kinds) if value and kinds and hub.is_name(value) else None
            if kinds and (lack := hub.lacks(path, kinds)):
                raise UserError(lack)
            return path

        def get(key: str = key, value: Any = value, why: str = why) -> Path:
            if why:
                raise UserError(why)
            return where(key, value)

        yield Need(f"{kind.words} {value or f'for {model}'}", here, get, published=value is not None)


def _bench(bench: dict[str, Any]) -> Need:
    file = bench_file(str(bench["path"]), bench["url"])

    def get() -> Path:
        load_bench(**bench)
        return file

    return Need(f"bench {bench['name']}", lambda: get() if file.exists() else None, get)


def prefetch(wanted: Iterable[Need]) -> bool:
    """Fetch what is not here, print a line for each; whether all is here that can be had."""
    complete = True
    for need in wanted:
        try:
            state, path = KNOWN, need.here()
            if path is None:
                state, path = FETCHED, need.get()
            print(f"{state:8} {_words(_size(path)):>9}  {need.words}", flush=True)
        except UserError as error:
            print(f"{MISSING:8} {'':9}  {need.words}: {one_line(error)}", flush=True)
            complete = complete and not need.published
    return complete


def _size(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def _words(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
