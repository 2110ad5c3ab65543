"""The register of methods by name, and their order in tables; configs/method explains settings.

Nothing heavy is imported before a method is made, as what reads records imports the order.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..settings import check_settings

if TYPE_CHECKING:
    from ..engine import Drafter, Target, Tree

AUTO = "auto"  # value of `nodes`: the size is tuned while decoding
# arguments that a builder gives a method that takes them
OFFERED = ("target", "vocab_size", "device", "eos", "tree")
RANKS = 32  # children of a node that a template may have if its method has no k
# In the order of tables and figures.
METHODS = {
    "vanilla": "vanilla.Vanilla",
    "lookahead": "rivals.lookahead.Lookahead",
    "pld": "copying.pld.PromptLookup",
    "ngram_cache": "rivals.ngram_cache.NgramCache",
    "rest": "copying.rest.Rest",
    "suffix": "copying.suffix.Suffix",
    "sps": "trained.sps.Speculative",
    "medusa": "trained.medusa.Medusa",
    "hydra": "trained.hydra.Hydra",
    "eagle": "trained.eagle.Eagle",
    "eagle2": "trained.eagle.Eagle2",
    "eagle3": "trained.eagle.Eagle3",
    "samd": "trained.samd.Samd",
    "dynamic": "dynamic.dynamic.DynamicRecycling",
    "goose": "rivals.goose.Goose",
    "logitspec": "rivals.logitspec.LogitSpec",
    "racer": "rivals.racer.Racer",
    "suffix_decoding": "copying.suffix_decoding.SuffixDecoding",
    "suffix_recycling": "copying.suffix.SuffixRecycling",
    "recycling": ".recycling.token_recycling.TokenRecycling",
}
DEFAULT = "dynamic"  # of the library: the fastest known on real text


def method_class(name: str) -> Callable[..., Any]:
    """Return the class of a method, or what an import path names. Raises UserError if none."""
    name = str(name)
    module, _, attribute = METHODS.get(name, name).rpartition(".")
    if not module:
        raise UserError(f"method {name}: unknown; there is {', '.join(METHODS)}, or an import path")

    try:
        factory = getattr(
            importlib.import_module("." * (name in METHODS) + module, __package__), attribute
        )
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"method {name}: must be a method's name or an import path ({error})"
        ) from None

    if not callable(factory):
        raise UserError(f"method {name}: must be a class or a function")
    return factory  # type: ignore[no-any-return]


def takes_tree(factory: Callable[..., Any]) -> bool:
    return "tree" in inspect.signature(factory).parameters


def make_method(
    name: str, target: Target, /, *, eos: Collection[int] = (), **settings: Any
) -> Drafter:
    """Make a method of METHODS, or of an import path, for a target.

    A method that can tune its size does so if neither `nodes` nor `tree` is set.
    """
    from ..engine.contract.sizing import finds_size

    factory = method_class(name)
    if finds_size(factory) and settings.keys().isdisjoint({"tree", "nodes"}):
        settings["nodes"] = AUTO
    return build_drafter(factory, target, settings, eos=eos)


def build_drafter(
    factory: Callable[..., Any], target: Target, settings: dict[str, Any], **offered: Any
) -> Drafter:
    """Build a drafter; it gets those of the `offered` arguments that its signature names.

    A `tree` may be a `Tree`, a template's name, `best:N` or what `build_template` takes.
    """
    from ..engine import Drafter

    offered |= {"vocab_size": target.vocab_size, "device": target.device, "target": target}
    parameters = inspect.signature(factory).parameters
    check_settings(settings, factory, "method.", without=offered, library=True)
    arguments = {key: value for key, value in offered.items() if key in parameters} | settings
    if arguments.get("tree") is not None:
        k = settings.get("k", parameters["k"].default if "k" in parameters else RANKS)
        arguments["tree"] = _template(arguments["tree"], k)

    drafter = factory(**arguments)
    if not isinstance(drafter, Drafter):
        raise UserError(
            f"method: {factory.__name__} does not make a drafter (model.engine.Drafter)"
        )
    if type(drafter).session is Drafter.session:
        raise UserError(
            f"method: {factory.__name__} has no sessions; derive from DeviceDrafter, or write one"
        )
    if drafter.draft_tree is None:
        drafter.draft_tree = arguments.get("tree")
    if drafter.sizing is not None and target.lean is not None and target.lean.times:
        drafter.sizing.expect(*target.lean.curve)
    return drafter


def _template(tree: Any, k: int) -> Tree:
    from ..engine import Tree
    from ..recycling import build_template

    if isinstance(tree, Tree):
        return tree
    if isinstance(tree, Mapping):
        return build_template(**tree, k=k)
    template, _, nodes = str(tree).partition(":")
    if nodes and not nodes.isdecimal():
        raise UserError(f"tree={tree}: what follows the colon must be a number of nodes")
    return build_template(template, k=k, nodes=int(nodes) if nodes else None)
