"""From lists of settings to jobs: every combination, each with the overrides that its own method and tree have."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from model.sizing.online_size import finds_size

GROUPS = ("method", "tree")  # whose choices differ in the settings they have
IN_GROUPS = tuple(f"{group}." for group in GROUPS)  # how their settings begin
ONE = re.compile(rf"^((?:{'|'.join(GROUPS)})\.[^=]+)=choice\(([^,]*)\)$")  # a list of one of them
FINDS = "nodes=auto"  # among a drafter's parameters, where the size of its drafts can be found while decoding
Find = Callable[[str], Any]  # a config of Hydra's search path by its name, e.g. method/pld; None where there is none


def key_of(override: str) -> str:
    """The key of `key=value`, without the signs that add it."""
    return override.split("=", 1)[0].lstrip("+")


def value_of(override: str) -> str:
    """The value of `key=value`, of a quoted one what it quotes."""
    value = override.partition("=")[2]
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] in "'\"" else value


def listed(arguments: Sequence[str]) -> list[str]:
    """A sweep's arguments, where `method.K=V` is a list of one.

    Hydra composes what is no list before there are jobs, and refuses what the default method lacks.
    """
    sweep = any(word in ("-m", "--multirun") or word.startswith("experiment=") for word in arguments)
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
    """The jobs of a product of overrides, in its order and each once; and the keys that any of them uses.

    Args:
        defaults: the choice of each of GROUPS where a job names none.
        equal: keys that have one value in each job; a job in which two of them differ is left out.
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
    """The product's jobs with the settings of each further job in place of their own; repeats are dropped later.

    A further job whose values the product does not go through is left out, but for those of `equal`: a published size
    next to swept budgets.
    """
    swept: dict[str, set[str]] = {}
    for override in (override for job in product for override in job):
        swept.setdefault(key_of(override), set()).add(override)
    found = []
    for more in also:
        keys = {key_of(override) for override in more}
        if all(o in swept.get(key_of(o), {o}) or key_of(o) in equal for o in more):
            found += [[o for o in job if key_of(o) not in keys] + list(more) for job in product]
    return found


def in_rounds(jobs: Sequence[list[str]]) -> list[list[str]]:
    """The jobs of a repeat together, further ones too: what is measured at another time meets another machine."""
    repeats: dict[str, list[list[str]]] = {}
    for job in jobs:
        repeats.setdefault(next((o for o in job if key_of(o) == "repeat"), ""), []).append(job)
    return [job for members in repeats.values() for job in members]


def applicable(job: Sequence[str], defaults: dict[str, str], find: Find) -> list[str]:
    """The overrides of a job that its own method and tree have."""
    choices = dict(defaults)
    for override in job:
        if (key := override.partition("=")[0]) in GROUPS:
            choices[key] = value_of(override)
    kept = []
    for override in job:
        group, _, setting = key_of(override).partition(".")
        if group == "tree" and not _drafts_from_a_tree(choices["method"], choices["tree"], find):
            continue
        if group == "method" and setting == "nodes" and _follows_the_machine(choices["method"], choices["tree"], find):
            continue  # tree.nodes is its budget
        own = group in GROUPS and setting and not override.startswith("+")
        if own and not _has(group, choices[group], setting, find):
            continue
        kept.append(override)
    return kept


def _drafts_from_a_tree(method: str, tree: str, find: Find) -> bool:
    """Whether a method's drafter takes this template, or follows the machine if asked for that.

    One that cannot be found is told when its job runs.
    """
    takes = _taken_by(method, find)
    return takes is None or "tree" in takes or _follows_the_machine(method, tree, find)


def _follows_the_machine(method: str, tree: str, find: Find) -> bool:
    """Whether it is asked for trees of its own whose size follows step times."""
    taken = _taken_by(method, find) or ()
    return (tree == "auto" and "step_seconds" in taken) or (tree == "online" and FINDS in taken)


def _taken_by(method: str, find: Find) -> frozenset[str] | None:
    """The parameters of a method's drafter; None where it cannot be found."""
    config = find(f"method/{method}")
    return None if config is None else _taken(config.get("drafter"))


@lru_cache(maxsize=64)
def _taken(source: str | None) -> frozenset[str] | None:
    """The parameters of the drafter of that name, and FINDS; None where there is none of that name."""
    if source is None:
        return frozenset()
    module, _, name = str(source).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
        return frozenset((*inspect.signature(found).parameters, *([FINDS] if finds_size(found) else [])))
    except (ImportError, AttributeError, ValueError, TypeError):
        return None


def _has(group: str, choice: str, setting: str, find: Find) -> bool:
    """Whether a method has a setting, or a template a parameter (those it has not are null in its file)."""
    own = find(f"{group}/{choice}")
    if own is None:
        return True  # Hydra tells that there is no such choice
    name = setting.split(".")[0]
    if name in own:
        return group != "tree" or own[name] is not None
    parents = [entry for entry in own.get("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    return any(_has(group, parent, setting, find) for parent in parents)
