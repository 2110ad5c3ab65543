"""The register of methods: each by its name, and where tables show it. configs/method/NAME.yaml holds its settings.

From outside: the register and `make_method`; a class by its file. May import `engine`, `recycling`, `structures`.

A class raises UserError for a setting that is out of range, or a file that does not fit. Nothing heavy is imported
before a method is made, so that what reads records can have the order alone.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    from ..engine import Drafter, Target, Tree

AUTO = "auto"
METHODS = {
    "vanilla": "vanilla.Vanilla",
    "pld": "pld.PromptLookup",
    "suffix": "suffix.Suffix",
    "suffix_decoding": "suffix_decoding.SuffixDecoding",
    "lookahead": "lookahead.Lookahead",
    "ngram_cache": "ngram_cache.NgramCache",
    "rest": "rest.Rest",
    "recycling": ".recycling.token_recycling.TokenRecycling",
    "suffix_recycling": "suffix.SuffixRecycling",
    "spine": "spine.Spine",
    "goose": "goose.Goose",
    "logitspec": "logitspec.LogitSpec",
    "racer": "racer.Racer",
    "dynamic": "dynamic.DynamicRecycling",
    "sps": "sps.Speculative",
    "medusa": "medusa.Medusa",
    "eagle": "eagle.Eagle",
    "eagle2": "eagle.Eagle2",
}
DEFAULT = "dynamic"  # of the library: the fastest known on real text
# In the order of tables and figures, transformers' own decoding first. Other methods come next, and recycling is last.
FIRST_IN_TABLES = (
    *("hf", "vanilla", "lookahead", "pld", "ngram_cache", "rest", "suffix", "sps"),
    *("medusa", "eagle", "eagle2"),
)


def table_place(name: str) -> int:
    if name in FIRST_IN_TABLES:
        return FIRST_IN_TABLES.index(name)
    return len(FIRST_IN_TABLES) + (name == "recycling")


def method_class(name: str) -> type[Drafter]:
    """Return the class of a method. Raises UserError if there is none of that name."""
    if name not in METHODS:
        raise UserError(f"method {name}: unknown; there is {', '.join(METHODS)}")
    module, _, kind = METHODS[name].rpartition(".")
    method: type[Drafter] = getattr(importlib.import_module(f".{module}", __package__), kind)
    return method


def is_sharded(target: Target) -> bool:
    """True if processes share each layer (transformers' `tp_plan`): all must draft alike, whatever a clock says."""
    return getattr(target.model, "tp_size", None) not in (None, 1)


def make_method(name: str, target: Target, /, *, eos: Collection[int] = (), **settings: Any) -> Drafter:
    """Make a method for a target.

    Args:
        name: one of METHODS.
        eos: ids that end an answer; some methods do not draft beyond them.
        settings: its own, see its class. `tree` may be a template's name or `best:N`. For methods with either setting
            `nodes` defaults to `auto` if neither is set: as many as pay, found while decoding. Sharded models get a
            fixed size.

    Raises UserError: no such method, or a setting that it does not take.
    """
    from ..engine.sizing import finds_size

    factory = method_class(name)
    parameters = inspect.signature(factory).parameters
    if finds_size(factory) and settings.keys().isdisjoint({"tree", "nodes"}):
        if not is_sharded(target):
            settings["nodes"] = AUTO
        elif "tree" in parameters:
            settings["tree"] = "2.2.2"
    supplied: dict[str, Any] = {"vocab_size": target.vocab_size, "device": target.device, "target": target, "eos": eos}
    if "tree" in settings and "tree" in parameters:
        k = settings.get("k")
        settings["tree"] = _template(settings["tree"], k if type(k) is int else 8)
    names = [key for key in parameters if key not in supplied]
    if unknown := sorted(settings.keys() - set(names)):
        raise UserError(f"method {name}: does not take {', '.join(unknown)}; it takes {', '.join(names) or 'nothing'}")
    needed = [key for key in names if parameters[key].default is inspect.Parameter.empty and key not in settings]
    if needed:
        raise UserError(f"method {name}: needs {', '.join(needed)}")
    try:
        return factory(**{key: value for key, value in supplied.items() if key in parameters} | settings)
    except (TypeError, ValueError, AttributeError) as error:  # a setting of another type
        raise UserError(f"method {name}: {', '.join(map(str, settings.items()))}: {error}") from None


def _template(tree: Any, k: int) -> Tree:
    """Return a draft tree: itself, or by its template's name or `best:N`, of ranks below k."""
    from ..engine import Tree
    from ..recycling import build_template

    if isinstance(tree, Tree):
        return tree
    template, _, nodes = str(tree).partition(":")
    if nodes and not nodes.isdigit():
        raise UserError(f"tree={tree}: what follows the colon must be a number of nodes")
    return build_template(template, k=k, nodes=int(nodes) if nodes else None)
