"""Check settings against the signature of the function or class that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from .errors import UserError, closest

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
WORDS |= {list: "a list as [a,b]", dict: "a mapping", NoneType: "null"}
# the library's options that are no settings of a method, by what takes them
OPTIONS = {
    "generate": ("max_new_tokens",),
    "Decoder.generate": ("sampling", "stop"),
    "Decoder.generate_all": ("batch",),
    "Decoder": ("eos", "chat_template_kwargs"),
    "Decoder or Generate": ("method", "start", "context", "execution", "linear"),
    "Decoder.from_pretrained": ("dtype", "device", "revision", "trust_remote_code", "quantize"),
    "sampling=Sampling(temperature=...) or of model.generate": (
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "seed",
    ),
}


def option_like(key: str) -> str:
    for taker, names in OPTIONS.items():
        if name := closest(key, names):
            return f"did you mean {name} of {taker}?"
    return ""


def check_settings(
    settings: dict[str, Any],
    taker: Callable[..., Any],
    prefix: str = "",
    without: Collection[str] = (),
    allow_extra: bool = False,
    library: bool = False,
) -> None:
    """Check names and types of settings against the parameters of `taker`; none may be missing.

    Args:
        prefix: of the settings' names in messages, such as `model.`.
        without: parameters of `taker` that are not settings.
        allow_extra: permit other keys, unless one looks like a misspelt setting.
        library: name one of OPTIONS that a key is like.
    """
    try:
        signature = inspect.signature(taker, eval_str=True)
    except (NameError, AttributeError, TypeError):  # a type imported only for type checkers
        signature = inspect.signature(taker)

    name = getattr(taker, "__name__", type(taker).__name__)
    parameters: dict[str, inspect.Parameter] = {}
    for key, parameter in signature.parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            allow_extra = True
        elif parameter.kind != parameter.VAR_POSITIONAL and key not in without:
            parameters[key] = parameter

    for key, value in settings.items():
        if key in parameters:
            if not _fits(value, parameters[key]):
                raise UserError(f"{prefix}{key}={value}: {_in_words(parameters[key])}")
            continue
        near = closest(key, parameters)
        if not allow_extra or (near and _fits(value, parameters[near])):
            if near:
                meant = f"did you mean {near}?"
            else:
                meant = (
                    library and option_like(key)
                ) or f"{name} has {', '.join(parameters) or 'none'}"
            raise UserError(f"{prefix}{key}: no such setting; {meant}")

    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in settings:
            raise UserError(f"{prefix}{key}: {name if prefix else 'a run'} needs this setting")


def text_settings(taker: Callable[..., Any]) -> dict[str, bool]:
    """Return parameters that hold a text, with True if it may be None."""
    optional = {}
    for key, parameter in inspect.signature(taker, eval_str=True).parameters.items():
        kinds = {*_kinds(parameter.annotation)}
        texts = kinds - {NoneType}
        if texts and all(kind is str or isinstance(kind, str) for kind in texts):
            optional[key] = texts != kinds
    return optional


def _kinds(annotation: Any) -> list[Any]:
    origin = get_origin(annotation) or annotation
    if origin in (UnionType, Union):
        kinds: list[Any] = []
        for part in get_args(annotation):
            kinds += _kinds(part)
        return kinds
    if origin is Literal:
        return list(get_args(annotation))
    if origin in (Sequence, tuple):
        return [list]
    return [origin if origin in [*WORDS] else object]


def _fits(value: Any, parameter: inspect.Parameter) -> bool:
    kinds = _kinds(parameter.annotation)
    kind = list if type(value) is tuple else type(value)
    if kind is str and value in kinds:
        return True
    if kind is int and float in kinds:
        return True
    return object in kinds or kind in kinds


def _in_words(parameter: inspect.Parameter) -> str:
    words = [WORDS.get(kind, kind) for kind in _kinds(parameter.annotation)]
    if words[0] in WORDS.values():
        return f"must be {' or '.join(words)}"
    return f"use one of {', '.join(words)}"
