"""What a configuration may hold: a setting that nobody takes, or not so, is told in one line with its place.

Which settings there are, of which types, and which may be left out: the signatures say it of those who take them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf

from model.errors import UserError
from model.recycling import build_template

from .bench import load_bench
from .companions import make_ready
from .model_settings import ModelSettings

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
WORDS |= {list: "a list as [a,b]", dict: "a mapping", NoneType: "null"}
GROUPS: dict[str, Callable[..., Any]] = {"model": ModelSettings, "bench": load_bench, "tree": build_template}
LEAST = {"max_new_tokens": 1, "num_choices": 1, "repeats": 1, "repeat": 0}


@dataclass
class Settings:
    """A run's configuration; configs/config.yaml explains it."""

    model: dict[str, Any]
    bench: dict[str, Any]
    method: dict[str, Any]
    tree: dict[str, Any]
    name: str
    start: str
    max_new_tokens: int
    execution: str
    num_choices: int
    repeats: int
    repeat: int | None
    interleave: bool
    mixed: bool
    phases: bool
    seed: int
    results_dir: str
    run_dir: str | None


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The configuration of a run, resolved, as its records hold it; what its method needs is there then.

    Raises:
        UserError: what is wrong with it; nothing is loaded yet, and no device waited for.
    """
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    check(config, Settings, own=True)
    check_groups(config)
    for key in {"name", "drafter"} - config["method"].keys():
        raise UserError(f"method.{key}: a method needs this setting")
    for key, least in LEAST.items():
        if config[key] is not None and config[key] < least:
            raise UserError(f"{key}={config[key]}: must be a whole number, at least {least}")
    repeats, folder = config["repeats"], config["run_dir"]
    if folder is not None and repeats > 1 and config["repeat"] is None:
        raise UserError(f"run_dir={folder}: holds one run, but repeats={repeats}; leave out one of the two")
    make_ready(config["method"], config["model"]["name"])
    return config


def check_groups(config: dict[str, Any]) -> None:
    """`check` of those groups that are given, but of a method's settings, which are its drafter's."""
    for group in GROUPS.keys() & config.keys():
        check(config[group], GROUPS[group], f"{group}.", without=("k",))  # the method's, where a tree takes it


def check(
    given: dict[str, Any], taker: Callable[..., Any], place: str = "", without: Collection[str] = (), own: bool = False
) -> None:
    """Refuse settings that `taker` does not take, that its annotations do not allow, or that it misses.

    Args:
        place: where they stand.
        without: parameters of `taker` that are none of the settings.
        own: others may stand there, too, from which these are interpolated, but no slip of the pen.

    Raises:
        UserError: says which, and what there is.
    """
    try:
        signature = inspect.signature(taker, eval_str=True)
    except NameError:  # of a type that is imported for type checkers alone
        signature = inspect.signature(taker)
    takes = {key: parameter for key, parameter in signature.parameters.items() if key not in without}
    for key, value in given.items():
        if key in takes:
            if not _fits(value, takes[key]) and (key != "name" or not isinstance(value, int | float)):  # name=2026
                raise UserError(f"{place}{key}={value}: {_in_words(takes[key])}")
            continue
        near = difflib.get_close_matches(key, takes, 1, 0.75)
        if not own or (near and _fits(value, takes[near[0]])):
            meant = f"did you mean {near[0]}?" if near else f"{taker.__name__} has {', '.join(takes) or 'none'}"
            raise UserError(f"{place}{key}: no such setting; {meant}")
    for key, parameter in takes.items():
        if parameter.default is parameter.empty and key not in given:
            raise UserError(f"{place}{key}: {taker.__name__ if place else 'a run'} needs this setting")


def _kinds(annotation: Any) -> list[Any]:
    """What an annotation allows: types, and the texts of a Literal; `object` is what no configuration can hold."""
    origin = get_origin(annotation) or annotation
    if origin in (UnionType, Union):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    if origin is Literal:
        return list(get_args(annotation))
    return [list if origin in (Sequence, tuple) else origin if origin in [*WORDS] else object]


def _fits(value: Any, parameter: inspect.Parameter) -> bool:
    kinds = _kinds(parameter.annotation)
    return object in kinds or type(value) in kinds or value in kinds or (type(value) is int and float in kinds)


def _in_words(parameter: inspect.Parameter) -> str:
    words = [WORDS.get(kind, kind) for kind in _kinds(parameter.annotation)]
    return f"use one of {', '.join(words)}" if words[0] not in WORDS.values() else f"must be {' or '.join(words)}"
