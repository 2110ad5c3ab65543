"""Expand a command line and its experiment to jobs, each with only settings that it has.

hydra.sweeper.params is the grid, in Hydra's form. Settings in hydra.sweeper.equal have the same
value in a job. hydra.sweeper.also lists further runs, written as on a command line, and
hydra.sweeper.also_on_cuda those that need a GPU; their other settings are the grid's. Typed
settings replace the grid's lists and narrow further runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from itertools import product
from numbers import Number
from shlex import split
from types import NoneType
from typing import Any, NamedTuple

import torch
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
)
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from model.errors import UserError
from model.files import ROOT, local_path, located
from model.methods import RANKS, method_class, takes_tree
from model.recycling import build_template
from model.recycling.templates import PARAMETERS

from ..loading.hub import missing_companion
from ..records.store import Planned
from .config import TEXTS, check_groups, config_errors, meant

DEPENDENT = ("method.", "tree")  # prefixes of settings that exist only for some methods and trees
# what decides the list of jobs, so that it has one value
DECIDING = re.compile(r"(experiment|preset|launcher|repeats|batches|hydra|quickstart|paper)\b")
READ_AS_TEXT = (str, QuotedString, RangeSweep, Glob)
# a part of a list: in quotes, or up to a comma that is not within ${...} or behind a backslash
PART = re.compile(
    r"""(?:^|,)(\s*'(?:\\.|[^'\\])*'\s*(?=,|$)|\s*"(?:\\.|[^"\\])*"\s*(?=,|$)"""
    r"""|(?>(?:\$\{[^}]*\}|\\.?|[^,\\])*))"""
)
BASIC = "basic"  # Hydra's own launcher: jobs run in this process, where they can be interleaved

version.setbase(None)  # Hydra's present defaults


class Composed(NamedTuple):
    """A command line as Hydra composes it; `config` includes Hydra's own settings."""

    jobs: list[Planned]
    config: DictConfig
    loader: ConfigLoader
    given: set[str]  # names of the typed settings


def compose(words: Sequence[str], config_dir: str | None = None) -> Composed:
    """Compose a command line to its jobs. Raises UserError for a setting that no job has."""
    # the paper calls it k
    words = [as_typed(re.sub(r"^\+*k=", "method.k=", word)) for word in words]
    with config_errors():
        loader = _config_loader(config_dir)
        typed = OverridesParser.create(config_loader=loader).parse_overrides(words)
        common = []  # each job decides the value of the others

        for word, o in zip(words, typed, strict=True):
            name = o.key_or_group
            if re.match(r"hydra\.(?!launcher|sweeper|searchpath|job\.env)", name):
                raise UserError(
                    f"{name}: has no effect; results go to results_dir=FOLDER, there to name=NAME"
                )
            if o.is_delete():
                raise UserError(f"{word}: a job has all settings; give it a value")
            if not o.is_sweep_override():
                common += [] if name.startswith(DEPENDENT) else [word]
            elif DECIDING.match(name):
                each = "a command for each, or lists of settings as model=A,B method=A,B"
                raise UserError(
                    f"{word}: takes one value, as the list of jobs is made from it; give {each}"
                )

        config = _load(loader, common)
        jobs = plan(typed, config, loader)
        if config.run_dir is not None and len(jobs) > 1:
            raise UserError(f"run_dir={config.run_dir}: holds one run, and here are {len(jobs)}")
        return Composed(jobs, config, loader, {o.key_or_group for o in typed})


def _config_loader(config_dir: str | None) -> ConfigLoader:
    search_path = create_config_search_path(str(ROOT / "configs"))
    if config_dir is not None:
        folder = local_path(config_dir).resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir={config_dir}: no such folder")

        search_path.prepend("own", f"file://{folder}")

    return ConfigLoaderImpl(search_path)


def _load(loader: ConfigLoader, words: list[str]) -> DictConfig:
    config: DictConfig = loader.load_configuration("config", words, RunMode.RUN, from_shell=False)
    return config


def group_settings(words: Sequence[str], *groups: str) -> dict[str, dict[str, Any]]:
    """Compose and check these groups only. Raises UserError for a wrong or unrelated setting."""
    for word in words:
        if re.split(r"[.=]", word)[0] not in groups:
            count = " and ".join(f"{group}=NAME and {group}.KEY=VALUE" for group in groups)
            raise UserError(f"{word}: only {count} count here")

    job, *others = compose(words).jobs
    if others:
        raise UserError(f"{' '.join(words)}: each setting takes one value here")

    with config_errors():
        config: Any = {
            group: OmegaConf.to_container(job.config[group], resolve=True) for group in groups
        }

    check_groups(config)
    return config  # type: ignore[no-any-return]


def named(group: str, name: str) -> dict[str, str]:
    """Return the settings for a shipped model or bench, or for one at a path."""
    if (ROOT / "configs" / group / f"{name}.yaml").is_file():
        return {group: name}

    if group == "model":
        return {"model": "path", "model.path": name}

    return {"bench": "file", "bench.path": str(located(name).resolve())}


def quoted(value: Any) -> str:
    """Return a value as written on a command line: text in quotes, as 2024_06_01 is a number."""
    if value is None or isinstance(value, Number):
        return "null" if value is None else str(value).lower()

    if isinstance(value, list | tuple):
        return f"[{','.join(map(quoted, value))}]"

    return str(QuotedString(str(value), Quote.single).with_quotes())


def as_typed(word: str) -> str:
    """Quote the value of a setting where Hydra cannot read it, or reads a text as something else.

    Lists (a,b), choice(a,b), ${...}, quotes and null keep their meaning.
    """
    key, equals, value = word.partition("=")
    null = TEXTS.get(key.lstrip("+"))
    if null is None:
        return key + equals + _readable(value, object)
    return key + equals + _readable(value, (*READ_AS_TEXT, *[NoneType] * null))


def _readable(value: str, kinds: Any) -> str:
    """Return a value, or list of values, quoted if Hydra would not read these types."""
    try:
        read = OverridesParser.create().parse_override(f"x={value}").value()
        is_sweep = isinstance(read, ChoiceSweep)
        if all(isinstance(part, kinds) for part in (read.list if is_sweep else [read])):
            return value
    except HydraException:
        is_sweep = True

    begins = r"choice\(|\[" if kinds is object else r"choice\("
    is_list = re.fullmatch(rf"({begins})(.*)([)\]])", value)
    begin, inner, end = is_list.groups() if is_list else ("", value, "")
    parts = PART.findall(inner)
    if is_sweep and (is_list or len(parts) > 1):
        return begin + ",".join(_readable(part.strip(), kinds) for part in parts) + end
    return quoted(value)


def plan(typed: Sequence[Override], sweep: DictConfig, loader: ConfigLoader) -> list[Planned]:
    """Return each job of a sweep once, in the order of repeats, as the machine drifts.

    Raises UserError for a typed setting that no method or tree has.
    """
    sweeper: Any = OmegaConf.to_container(sweep.hydra.sweeper, resolve=True)
    parse = OverridesParser.create(config_loader=loader).parse_overrides
    groups = {*loader.list_groups("")}

    typed_values = values_of([o for o in typed if not o.is_hydra_override()])
    if not isinstance(sweep.repeats, int) or sweep.repeats < 1:
        raise UserError(f"repeats={sweep.repeats}: must be a whole number, at least 1")
    if "null" in typed_values.get("repeat", ()):
        del typed_values["repeat"]  # null: all of them

    params = values_of(parse([f"{key}={values}" for key, values in sweeper["params"].items()]))
    if not sweep.timed:
        params["repeat"] = ["0"]  # the other repeats would be the same

    grids = [params | typed_values]
    on_cuda = torch.cuda.is_available() and sweep.model.device != "cpu"
    for run in sweeper["also"] + sweeper["also_on_cuda"] * on_cuda:
        further = values_of(parse([*map(as_typed, split(run))]))
        for key in further.keys() & typed_values.keys():
            further[key] = [value for value in further[key] if value in typed_values[key]]
        grids.append(params | typed_values | further)

    @cache  # composing takes a tenth of a second
    def load(*choices: str) -> DictConfig:
        return _load(loader, [*sweep.hydra.overrides.hydra, *choices])

    def composed(job: dict[str, str]) -> DictConfig:
        return load(*(f"{key}={job[key]}" for key in job if key.strip("+") in groups))

    def planned(job: dict[str, str], words: list[str]) -> Planned:
        config = deepcopy(composed(job))
        for o in parse(words):
            if o.key_or_group not in groups:
                add = o.is_add() or o.is_force_add()
                OmegaConf.update(config, o.key_or_group, o.value(), force_add=add)

        config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        lacks = missing_companion(config.method, str(config.model.name))
        return Planned(words, config, lacks or too_wide(config.method, config.tree))

    jobs: dict[frozenset[str], Planned] = {}
    for grid in grids:
        for values in product(*grid.values()):
            job = dict(zip(grid, values, strict=True))
            chosen = composed(job)
            has = own_settings(chosen.method, chosen.tree)
            for key in grid:
                if key.startswith(DEPENDENT) and ".".join(key.split(".")[:2]) not in has:
                    del job[key]

            words = [f"{key}={value}" for key, value in job.items()]
            is_equal = len({job[key] for key in sweeper["equal"] if key in job}) <= 1
            if is_equal and frozenset(words) not in jobs:
                jobs[frozenset(words)] = planned(job, words)

    used = {word.partition("=")[0] for words in jobs for word in words}
    for key in sorted(typed_values.keys() - params.keys() - used):
        if "." in key or key == "tree":
            raise UserError(f"{key}: no such setting of these methods and trees{meant(key)}")

    return sorted(jobs.values(), key=lambda job: job.config.repeat)


def values_of(overrides: Sequence[Override]) -> dict[str, list[str]]:
    values = {}
    for o in overrides:
        one = [str(o.input_line).partition("=")[2]]
        is_list = o.is_sweep_override()
        values[o.get_key_element()] = [*o.sweep_string_iterator()] if is_list else one

    return values


def own_settings(method: Any, tree: Any) -> set[str]:
    names = {f"method.{key}" for key in method}

    if drafts_from_tree(method):
        names |= {"tree", *(f"tree.{key}" for key in PARAMETERS.get(tree.name, ()))}

    return names


def drafts_from_tree(method: Any) -> bool:
    try:
        return takes_tree(method_class(method.drafter))
    except (UserError, ValueError, TypeError):  # the job itself reports an unknown drafter
        return False


def too_wide(method: Any, tree: Any) -> str:
    """Say that a template needs more candidates than the method keeps; else empty."""
    k = method.get("k")
    if not isinstance(k, int) or tree.name == "best" or not drafts_from_tree(method):
        return ""
    try:
        ranks = 1 + build_template(**tree, k=RANKS).max_rank
    except (UserError, TypeError):  # a wrong template
        return ""

    return f"tree={tree.name} needs method.k={ranks} or more, and here k={k}" if ranks > k else ""
