"""Settings checked against the signature of who takes them: names, types, defaults. The settings of a model."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from model.errors import UserError, new_names

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
WORDS |= {list: "a list as [a,b]", dict: "a mapping", NoneType: "null"}


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
    except (NameError, AttributeError, TypeError):  # as a type that is imported for type checkers alone
        signature = inspect.signature(taker)
    name, anything = getattr(taker, "__name__", type(taker).__name__), inspect.Parameter.VAR_KEYWORD
    own = own or anything in {parameter.kind for parameter in signature.parameters.values()}
    named = {key: p for key, p in signature.parameters.items() if p.kind not in (anything, p.VAR_POSITIONAL)}
    takes = {key: parameter for key, parameter in named.items() if key not in without}
    for key, value in given.items():
        if key in takes:
            if not _fits(value, takes[key]) and (key != "name" or not isinstance(value, int | float)):  # name=2026
                raise UserError(f"{place}{key}={value}: {_in_words(takes[key])}{new_names(f'{place}{key}={value}')}")
            continue
        near = difflib.get_close_matches(key, takes, 1, 0.75)
        renamed = new_names(place + key)
        if renamed or not own or (near and _fits(value, takes[near[0]])):
            meant = f"did you mean {near[0]}?" if near else f"{name} has {', '.join(takes) or 'none'}"
            raise UserError(f"{place}{key}: no such setting; {meant}{renamed}")
    for key, parameter in takes.items():
        if parameter.default is parameter.empty and key not in given:
            raise UserError(f"{place}{key}: {name if place else 'a run'} needs this setting")


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


@dataclass(frozen=True)
class ModelSettings:
    """What decides which model is loaded and how; equal settings share one loaded model."""

    name: str
    path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Any] | None = None
    tensor_parallel: bool = False
    template: str | None = None
    context: int | None = None
    attention: Literal["auto", "sdpa", "eager", "tree"] = "auto"
    linear: Literal["auto", "onednn", "fused", "torch"] = "auto"
    quantize: Literal["int8", "int4"] | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    @property
    def kernel(self) -> str | None:
        """What transformers loads the model with; tree stands on sdpa, and with auto it is transformers' own choice:
        sdpa, or eager for what has none (Gemma 2, gpt-oss)."""
        return None if self.attention == "auto" else "eager" if self.attention == "eager" else "sdpa"

    @property
    def first_execution(self) -> str:
        """Until a run says which: what goes with the attention."""
        return "static" if self.attention == "tree" else "eager"
