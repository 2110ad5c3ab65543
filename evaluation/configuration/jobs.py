"""Expand lists of settings to jobs: every combination, with only the overrides that its method and tree have."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from model.sizing import finds_size

GROUPS = ("method", "tree")  # groups whose choices have different settings
IN_GROUPS = tuple(f"{group}." for group in GROUPS)  # how their settings begin
ONE = re.compile(rf"^((?:{'|'.join(GROUPS)})\.[^=]+)=choice\(([^,]*)\)$")  # a list of one of them
FINDS_SIZE = "nodes=auto"  # marks, among a drafter's parameters, that it can find its draft size while decoding
Find = Callable[[str], Any]  # returns a config by its name, e.g. method/pld; None if there is none


def key_of(override: str) -> str:
    """Return the key of `key=value`, without leading `+`."""
    return override.split("=", 1)[0].lstrip("+")


def value_of(override: str) -> str:
    """Return the value of `key=value`, without quotes."""
    value = override.partition("=")[2]
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] in "'\"" else value


def listed(arguments: Sequence[str], multirun: bool = False) -> list[str]:
    """A sweep's arguments, where `method.K=V` is a list of one.

    Hydra composes what is no list before there are jobs, and refuses what the default method lacks.
    """
    sweep = multirun or any(word in ("-m", "--multirun") or word.startswith("experiment=") for word in arguments)
    sweep = sweep and not any(word.partition("=")[0] in ("--cfg", "-c", "--info", "-i") for word in arguments)
    return [_listed(word) if sweep and word.startswith(IN_GROUPS) else word for word in arguments]


def _listed(word: str) -> str:
    """`K=V` as `K=choice(V)`; a list, an interpolation and what Hydra cannot read stay as they are."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return word
    key, _, value = word.partition("=")
    return word if override.is_sweep_override() or not value or "${" in value else f"{key}=choice({value})"


def typed(arguments: Sequence[str]) -> list[str]:
    """What `listed` was given."""
    return [ONE.sub(r"\1=\2", word) for word in arguments]


def expand(
    product: Iterable[Sequence[str]], defaults: dict[str, str], find: Find, equal: Collection[str] = ()
) -> tuple[list[list[str]], set[str]]:
    """Return the jobs of a product of overrides, in order and without repeats, and the keys that they use.

    Args:
        defaults: the choice of each of GROUPS that a job does not name.
        equal: keys that must have the same value within a job; other jobs are left out.
    """
    jobs: dict[tuple[str, ...], None] = {}
    used: set[str] = set()
    for job in product:
        kept = applicable(job, defaults, find)
        if len({override.partition("=")[2] for override in kept if key_of(override) in equal}) <= 1:
            used |= {key_of(override) for override in kept}
            jobs[tuple(kept)] = None
    return [list(job) for job in jobs], used


def further(
    product: Sequence[Sequence[str]], also: Sequence[Sequence[str]], equal: Collection[str] = ()
) -> list[list[str]]:
    """Return the product's jobs with the settings of each job of `also` in place of their own, with repeats.

    A job of `also` is left out if the product sweeps one of its keys without its value. Keys in `equal` are exempt, for
    a published size next to swept budgets.
    """
    swept: dict[str, set[str]] = {}
    for override in (override for job in product for override in job):
        swept.setdefault(key_of(override), set()).add(override)
    jobs = []
    for overrides in also:
        keys = {key_of(override) for override in overrides}
        if all(o in swept.get(key_of(o), {o}) or key_of(o) in equal for o in overrides):
            jobs += [[o for o in job if key_of(o) not in keys] + list(overrides) for job in product]
    return jobs


def in_rounds(jobs: Sequence[list[str]]) -> list[list[str]]:
    """Order the jobs by repeat, those of `also` too, as the machine drifts between repeats."""
    repeats: dict[str, list[list[str]]] = {}
    for job in jobs:
        repeats.setdefault(next((o for o in job if key_of(o) == "repeat"), ""), []).append(job)
    return [job for members in repeats.values() for job in members]


def applicable(job: Sequence[str], defaults: dict[str, str], find: Find) -> list[str]:
    """Return the overrides of a job that its method and tree have."""
    choices = dict(defaults)
    for override in job:
        if (key := override.partition("=")[0]) in GROUPS:
            choices[key] = value_of(override)
    kept = []
    for override in job:
        group, _, setting = key_of(override).partition(".")
        if group == "tree" and not _drafts_from_a_tree(choices["method"], choices["tree"], find):
            continue
        if group == "method" and setting == "nodes" and _sizes_its_trees(choices["method"], choices["tree"], find):
            continue  # tree.nodes is its budget
        in_group = group in GROUPS and setting and not override.startswith("+")
        if in_group and not _has(group, choices[group], setting, find):
            continue
        kept.append(override)
    return kept


def _drafts_from_a_tree(method: str, tree: str, find: Find) -> bool:
    """True if a method's drafter takes a template, or sizes its own trees if asked to.

    Also True for an unknown drafter, which its job reports.
    """
    parameters = _method_parameters(method, find)
    return parameters is None or "tree" in parameters or _sizes_its_trees(method, tree, find)


def _sizes_its_trees(method: str, tree: str, find: Find) -> bool:
    """True if the method is asked to build its own trees, of a size found while decoding."""
    parameters = _method_parameters(method, find) or ()
    return tree == "auto" and FINDS_SIZE in parameters


def _method_parameters(method: str, find: Find) -> frozenset[str] | None:
    """Return the parameters of a method's drafter; None if there is no such drafter."""
    config = find(f"method/{method}")
    return None if config is None else _drafter_parameters(config.get("drafter"))


@lru_cache(maxsize=64)
def _drafter_parameters(source: str | None) -> frozenset[str] | None:
    """Return the parameters of a drafter by its import path, and FINDS_SIZE; None if there is no such drafter."""
    if source is None:
        return frozenset()
    module, _, name = str(source).rpartition(".")
    try:
        drafter = getattr(importlib.import_module(module), name)
        return frozenset((*inspect.signature(drafter).parameters, *([FINDS_SIZE] if finds_size(drafter) else [])))
    except (ImportError, AttributeError, ValueError, TypeError):
        return None


def _has(group: str, choice: str, setting: str, find: Find) -> bool:
    """True if a method has a setting, or a template a parameter (null in its file: it has not)."""
    config = find(f"{group}/{choice}")
    if config is None:
        return True  # Hydra reports that there is no such choice
    name = setting.split(".")[0]
    if name in config:
        return group != "tree" or config[name] is not None
    parents = [entry for entry in config.get("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    return any(_has(group, parent, setting, find) for parent in parents)
