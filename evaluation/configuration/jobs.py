"""Expand a command line and its experiment to jobs: a grid and further runs, each with what its method and tree have.

hydra.sweeper.params is the grid, in Hydra's form; those of its settings in hydra.sweeper.equal have one value in a job.
hydra.sweeper.also lists further runs, each written as on a command line and taking what it does not name from the grid.
What is typed replaces the grid's lists and narrows further runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from shlex import split
from typing import Any

import numpy as np
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from model.engine.sizing import finds_size
from model.errors import UserError
from model.files import ROOT
from model.methods import AUTO, RANKS, method_class, takes_tree
from model.recycling import build_template
from model.recycling.templates import PARAMETERS
from model.settings import check_settings

from ..errors import config_errors
from ..loading.companions import missing_companion
from ..records.sweeps import Planned

_header = ConfigSource._get_header_dict  # overlooks "# @package" behind a byte-order mark
ConfigSource._get_header_dict = staticmethod(lambda text: _header(text.removeprefix("\ufeff")))

SETTINGS = ("method.", "tree.")  # which of them there are depends on the job's method and tree
ONE_VALUE = ("experiment", "preset", "launcher")  # choices that the list of jobs is made from
Lists = dict[str, list[str]]  # the values that each key goes through
Settings = Callable[[str, dict[str, str]], Any]  # what a job's choice of a group composes to


def quoted(value: Any) -> str:
    """Return a value as a command line writes it. Text is in quotes: bare, 2024_06_01 is a number and null is none."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(quoted, value))}]"
    plain = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))  # no interpolation: OmegaConf halves backslashes before one
    return str(QuotedString(plain, Quote.single).with_quotes())


@dataclass(frozen=True)
class Composed:
    """A command line as Hydra composes it: its jobs, its configuration with Hydra's own settings, the loader."""

    jobs: list[Planned]
    config: DictConfig
    loader: ConfigLoader

    @property
    def is_sweep(self) -> bool:
        return bool(self.config.hydra.mode == RunMode.MULTIRUN)


def compose(words: Sequence[str], *, multirun: bool = False, config_dir: str | None = None) -> Composed:
    """Compose a command line: a sweep if it says so or names an experiment, else a single run.

    Raises:
        UserError: what Hydra does not find; a setting that no job has.
    """
    multirun = multirun or any(word.startswith("experiment=") for word in words)
    given = list(words)
    for word in words:
        if re.match(r"[+~]*hydra\.(?!launcher|sweeper|mode|searchpath|job\.env)", word):  # what is read of it
            raise UserError(f"{word}: has no effect; results go to results_dir=FOLDER, there to name=NAME")
    if multirun:  # what only some methods have cannot be composed before there are jobs
        given = [*(word for word in words if not word.startswith(SETTINGS)), "hydra.mode=MULTIRUN"]
    if config_dir:
        given.append(f"hydra.searchpath=[{quoted(f'file://{_own_configs(config_dir)}')}]")
    with config_errors(), _own_hydra() as hydra:
        mode, loader = RunMode.MULTIRUN if multirun else RunMode.RUN, hydra.config_loader
        config = hydra.compose_config("config", given, mode, from_shell=False)
        if multirun:
            return Composed(plan(words, config, loader), config, loader)
        if config.hydra.mode != RunMode.MULTIRUN:
            for word in words:
                if re.split(r"[.=]", word)[0] == "tree" and not drafts_from_tree(config.method, config.tree):
                    raise UserError(f"{word}: {config.method.name} drafts from no tree; leave it out")
            return Composed([planned([], config)], config, loader)
    return compose(words, multirun=True, config_dir=config_dir)  # a launcher makes a single run a sweep of one


def _own_configs(config_dir: str) -> Path:
    """Return the user's folder of configs. Raises UserError if there is none, or if configs/ hides one of its files."""
    folder, shipped = Path(config_dir).resolve(), ROOT / "configs"
    if not folder.is_dir():
        raise UserError(f"--config-dir={config_dir}: no such folder")
    for path in shipped.rglob("*.yaml"):
        if (own := folder / path.relative_to(shipped)).exists():
            raise UserError(f"{own}: configs/ has a file of this name, which would be used instead; rename yours")
    return folder


@contextmanager
def _own_hydra() -> Iterator[Any]:
    """Yield a Hydra of configs/; the caller's own, if there is one, is its again afterwards."""
    instance = GlobalHydra.instance()
    callers, instance.hydra = instance.hydra, None
    try:
        with initialize_config_dir(str(ROOT / "configs"), version_base=None):
            yield GlobalHydra.instance().hydra
    finally:
        GlobalHydra.instance().hydra = callers


def plan(words: Sequence[str], master: DictConfig, loader: ConfigLoader) -> list[Planned]:
    """Return the jobs of a sweep: its command line in its composed configuration.

    Raises:
        UserError: a setting was typed that none of the methods and trees has, or a list of what makes the jobs.
    """
    sweeper: Any = OmegaConf.to_container(master.hydra.sweeper, resolve=True)
    composed: Any = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)
    parser, groups = OverridesParser.create(config_loader=loader), loader.list_groups("")

    def lists(words: Sequence[str]) -> Lists:
        overrides = zip(words, parser.parse_overrides(list(words)), strict=True)
        return {
            o.get_key_element(): [*o.sweep_string_iterator()] if o.is_sweep_override() else [word.partition("=")[2]]
            for word, o in overrides
        }

    @cache  # it takes a tenth of a second
    def compose(*overrides: str) -> DictConfig:
        config: DictConfig = loader.load_sweep_config(master, [*overrides])
        return config

    def settings(group: str, job: dict[str, str]) -> Any:
        name = job.get(group, str(master.hydra.runtime.choices[group]))
        return compose(f"{group}={name}")[group]

    def planned_job(words: list[str]) -> Planned:
        overrides = parser.parse_overrides(words)
        values = [o for o in overrides if o.key_or_group not in groups and not o.is_delete()]
        choices = [word for word, o in zip(words, overrides, strict=True) if o not in values]
        config = deepcopy(compose(*choices))
        for o in values:
            OmegaConf.update(config, o.key_or_group, o.value(), merge=True, force_add=o.is_add() or o.is_force_add())
        return planned(words, config)

    reads = str(OmegaConf.to_container(master.hydra.sweeper, resolve=False))
    for word, o in zip(words, parser.parse_overrides(list(words)), strict=True):
        if o.is_sweep_override() and (o.key_or_group in ONE_VALUE or f"${{{o.key_or_group}}}" in reads):
            each = "a command for each, or lists of settings as model=A,B method=A,B"
            raise UserError(f"{word}: takes one value, as the list of jobs is made from it; give {each}")
    given = lists([word for word in words if word in composed or word.startswith(SETTINGS)])
    if not master.timed:
        given = {"repeat": ["0"]} | given  # the other repeats would be the same
    grid = lists([f"{key}={values}" for key, values in sweeper["params"].items()])
    jobs = expand(grid, [lists(split(run)) for run in sweeper["also"]], given, settings, sweeper["equal"])
    return [planned_job(job) for job in jobs]


def expand(
    grid: Lists, also: Sequence[Lists], given: Lists, settings: Settings, equal: Sequence[str] = ()
) -> list[list[str]]:
    """Return the overrides of each job once, repeat by repeat, as the machine drifts between repeats.

    Args:
        also: further runs; what they do not name is as in the grid.
        given: replaces lists of the grid; further runs with other values than these are left out.
        equal: keys that have one value within a job, as settings of several methods that mean the same.

    Raises:
        UserError: no job has a given setting, and the grid knows none of this name.
    """
    unknown = given.keys() - grid.keys()
    grid = grid | given
    narrowed = [{key: [v for v in values if v in given.get(key, [v])] for key, values in run.items()} for run in also]
    jobs: dict[frozenset[tuple[str, str]], dict[str, str]] = {}
    for lists in (grid, *(grid | run for run in narrowed)):
        for values in product(*lists.values()):
            job = applicable(dict(zip(lists, values, strict=True)), settings)
            if len({job[key] for key in equal if key in job}) <= 1:
                jobs.setdefault(frozenset(job.items()), job)
    for key in sorted(unknown):
        if ("." in key or key == "tree") and not any(key in job for job in jobs.values()):
            raise UserError(f"{key}={given[key][0]}: none of the methods or trees of this sweep has this setting")
    in_rounds = sorted(jobs.values(), key=lambda job: grid["repeat"].index(job["repeat"]))
    return [[f"{key}={value}" for key, value in job.items()] for job in in_rounds]


def applicable(job: dict[str, str], settings: Settings) -> dict[str, str]:
    """Return the overrides of a job that its method and tree have."""
    if not any(key == "tree" or key.startswith(SETTINGS) for key in job):
        return job
    method, tree = settings("method", job), settings("tree", job)
    has_tree = drafts_from_tree(method, tree)
    names: dict[str, set[str]] = {
        "method": set(method) - ({"nodes"} if has_tree and tree.name == AUTO else set()),  # tree.nodes is its budget
        "tree": {"", *(("nodes",) if tree.name == AUTO else PARAMETERS.get(tree.name, ()))} if has_tree else set(),
    }

    def has(key: str) -> bool:
        group, _, setting = key.partition(".")
        return not (key == "tree" or key.startswith(SETTINGS)) or setting.split(".")[0] in names[group]

    return {key: value for key, value in job.items() if has(key)}


def drafts_from_tree(method: Any, tree: Any) -> bool:
    """True if a drafter takes a template, or this is tree=auto and it finds its size."""
    try:
        factory = method_class(method.drafter)
        return takes_tree(factory) or (tree.name == AUTO and finds_size(factory))
    except (UserError, ValueError, TypeError):  # its job reports a drafter that there is not
        return False


def planned(overrides: list[str], config: DictConfig) -> Planned:
    """Return the job of these overrides, with its configuration without Hydra's own settings."""
    settings = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    lacks = missing_companion(settings.method, str(settings.model.name)) or too_wide(settings.method, settings.tree)
    return Planned(overrides, settings, lacks)


def too_wide(method: Any, tree: Any) -> str:
    """Say that a template needs more candidates than the method keeps; empty if not, or where its job reports more."""
    k = method.get("k")
    if not isinstance(k, int) or tree.name in (AUTO, "best") or not drafts_from_tree(method, tree):
        return ""
    try:
        check_settings(dict(tree), build_template, "tree.", without=("k",))
        ranks = 1 + build_template(**tree, k=RANKS).max_rank
    except UserError:
        return ""
    return f"tree={tree.name} needs method.k={ranks} or more, and here k={k}" if ranks > max(k, 0) else ""
