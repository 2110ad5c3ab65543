"""A method ready to answer prompts: a drafter on the engine, or transformers' own generate."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from model.engine import Drafter, Generation, StepRecord, Tree, generate
from model.engine.linear import stock_linears
from model.engine.sampling import GREEDY, Sampling
from model.engine.sizing import finds_size
from model.engine.step import unmarked
from model.errors import UserError
from model.files import load_state
from model.methods import METHODS, method_class
from model.recycling import TokenRecycling, build_template
from model.recycling.auto import AutoRecycling

from ..loading.digests import sha256_of
from ..loading.models import LoadedModel
from ..loading.settings import check_settings
from .companions import fetch_companions, path_of

COLD, HOT, CATEGORY = "cold", "hot", "category"
AUTO = "auto"  # the tree whose size is found while decoding
RANKS = 32  # children per node that a template may have if the method has no k
DTYPES = {"int64": torch.int64, "int32": torch.int32}


@dataclass
class Method:
    """One way to answer prompts.

    Attributes:
        name: as in configs/method/.
        drafter: None for `hf`, which does not run on this engine.
        start: cold, hot, category, or the file of a saved state; None if no state is kept between prompts.
        tree: None if the method has no template.
        settings: everything that decides the output, for the run's fingerprint.
        execution: of its steps, as `model.engine.decode` takes it.
    """

    name: str
    loaded: LoadedModel
    drafter: Drafter | None
    start: str | None
    tree: Tree | None
    settings: dict[str, Any]
    execution: str = "eager"

    @property
    def label(self) -> str:
        """The name in tables, with the start of a method that keeps state; tree=auto is hot unless it says cold."""
        tree = AUTO if self.settings.get("tree") == AUTO else None
        if self.start is None:
            return self.name if tree is None else f"{self.name} ({tree})"
        start = Path(self.start).stem
        if tree is not None:
            start = tree if self.start == HOT else f"{tree}, {start}"
        return f"{self.name} ({start})"

    def prepare(self) -> None:
        """Set the state at the start of a run."""
        if self.drafter is not None:
            self.drafter.reset()
            if self.start not in (None, COLD, HOT, CATEGORY):
                self.drafter.load_state_dict(load_state(Path(str(self.start))))

    def begin_prompt(self) -> None:
        """Reset the state if the start is cold."""
        if self.start == COLD and self.drafter is not None:
            self.drafter.reset()

    def answer(
        self,
        prompt: list[int],
        max_new_tokens: int,
        mark: Callable[[str], None] = unmarked,
        sampling: Sampling = GREEDY,
    ) -> Generation:
        """Answer one prompt. `mark` and `sampling` are those of `generate`."""
        if self.drafter is None:
            return _transformers_generate(self.loaded, prompt, max_new_tokens, sampling)
        self.begin_prompt()
        return generate(
            self.loaded.target,
            self.drafter,
            prompt,
            max_new_tokens=max_new_tokens,
            eos=self.loaded.eos,
            sampling=sampling,
            execution=self.execution,
            mark=mark,
        )


def build_method(
    loaded: LoadedModel, method: dict[str, Any], tree: dict[str, Any], start: str, execution: str = "eager"
) -> Method:
    """Build a method from its settings.

    Args:
        method: `name`, `drafter` (a shipped method's name or an import path; None: transformers' own generate), and the
            drafter's keyword arguments. A drafter also gets those of vocab_size, device, eos, tree, target that its
            signature names.
        tree: `name` and parameters of a template, for methods that take a `tree`.
        start: cold | hot | category | path of a saved state; ignored by methods without state.
        execution: of its steps.

    Raises:
        UserError: unknown drafter, start, setting or value, a tree that does not fit k, a missing companion.
    """
    fetch_companions(method, loaded.settings.name)
    options = {key: value for key, value in method.items() if key not in ("name", "drafter")}
    files = {
        key: path_of(key, value) for key, value in options.items() if key.endswith("path") and isinstance(value, str)
    }
    name, source = method["name"], method["drafter"]
    drafter: Drafter | None = None
    template: Tree | None = None
    sized: dict[str, Any] = {}
    if "k" in options and (not isinstance(options["k"], int) or options["k"] < 1):
        raise UserError(f"method.k={options['k']}: must be a whole number, at least 1")
    if source is not None:
        paths = {key: str(path) for key, path in files.items()}
        drafter, template, sized = _drafter(drafter_class(source), loaded, tree, options, paths)
    stateful = drafter is not None and drafter.stateful
    settings: dict[str, Any] = dict(method)
    if sized:
        settings |= {"tree": tree["name"], "nodes": tree["nodes"]}
    settings |= {f"{key}_sha256": sha256_of(path) for key, path in files.items()}
    if template is not None:
        nodes = [list(path) for path in template.rank_paths[1:]]
        settings |= {"tree": tree["name"], "tree_nodes": len(nodes), "tree_sha256": _sha256(repr(nodes).encode())}
    if stateful:
        settings["start"] = start
        if start not in (COLD, HOT, CATEGORY):
            if not Path(start).is_file():
                raise UserError(
                    f"start={start}: must be cold, hot, category or the file of a saved state; there is no such file"
                )
            settings["start_sha256"] = sha256_of(Path(start))
    built = Method(name, loaded, drafter, start if stateful else None, template, settings, execution)
    built.prepare()  # raises now if a saved state does not fit
    return built


def _drafter(
    factory: Callable[..., Any],
    loaded: LoadedModel,
    tree: dict[str, Any],
    options: dict[str, Any],
    paths: dict[str, str],
) -> tuple[Drafter, Tree | None, dict[str, Any]]:
    """Build the drafter and its template. Also returns the `nodes` that tree=auto gives a drafter.

    Args:
        options: the method's settings; `paths` are those that name files.
    """
    target, template = loaded.target, None
    offered: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "device": target.device,
        "eos": loaded.eos,
        "target": target,
    }
    check_settings(options, factory, "method.", without={*offered, "tree", "sizing"} - options.keys())
    if isinstance(options.get("nodes"), str):
        raise UserError(f"method.nodes={options['nodes']}: must be a number; tree=auto finds it while decoding")
    parameters, sized = inspect.signature(factory).parameters, dict[str, Any]()
    if tree["name"] == AUTO and (finds_size(factory) or "tree" in parameters):
        factory = _auto(factory, tree)
        sized = {"nodes": f"{AUTO}:{tree['nodes']}"}
    elif "tree" in parameters:
        offered["tree"] = template = build_template(**tree, k=options.get("k", RANKS))
    drafter = _construct(factory, options | sized | paths, offered)
    return drafter, drafter.largest if isinstance(drafter, AutoRecycling) else template, sized


def drafter_class(source: Any) -> Callable[..., Any]:
    """Return a shipped method's class by its name, or import a class or function by its path."""
    if source in METHODS:
        return method_class(source)
    module, _, attribute = str(source).rpartition(".")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"method.drafter={source}: must be a method's name or an import path ({error})") from None
    if not callable(factory):
        raise UserError(f"method.drafter={source}: must be a class or a function")
    return factory  # type: ignore[no-any-return]


def _construct(factory: Callable[..., Any], options: dict[str, Any], offered: dict[str, Any]) -> Drafter:
    """Call the factory with its options and those of the offered arguments that it names."""
    parameters = inspect.signature(factory).parameters
    arguments = {key: value for key, value in offered.items() if key in parameters} | options
    if "dtype" in options:
        if str(options["dtype"]) not in DTYPES:
            raise UserError(f"method.dtype={options['dtype']}: the matrix is int64 or int32")
        arguments["dtype"] = DTYPES[options["dtype"]]
    drafter = factory(**arguments)
    if not isinstance(drafter, Drafter):
        raise UserError(f"method.drafter: {factory.__name__} does not make a drafter (model.engine.Drafter)")
    if type(drafter).session is Drafter.session:
        raise UserError(f"method.drafter: {factory.__name__} has no sessions; derive from DeviceDrafter, or write one")
    return drafter


def _auto(factory: Callable[..., Any], tree: dict[str, Any]) -> Callable[..., Any]:
    """Return the factory for tree=auto, which finds the draft size while decoding.

    Raises:
        UserError: the method's drafts have a fixed size, or the tree has another setting than a budget of nodes.
    """
    if factory is not TokenRecycling and not finds_size(factory):
        raise UserError("tree=auto: is for methods whose drafts have any size; with this one name a template")
    unused = [key for key in ("depth", "branching", "path") if tree[key] is not None]
    if unused or not isinstance(tree["nodes"], int) or tree["nodes"] < 1:
        wrong = unused or tree["nodes"]
        raise UserError(f"tree=auto takes tree.nodes, a budget of at least 1, and nothing else ({wrong})")
    return AutoRecycling if factory is TokenRecycling else factory


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _transformers_generate(
    loaded: LoadedModel, prompt: list[int], max_new_tokens: int, sampling: Sampling
) -> Generation:
    """Decode with transformers' generate and torch's own linear layers: the paper's baseline.

    It draws with torch's generator. Each token is one step.
    """
    target = loaded.target
    limit = target.token_budget(prompt, max_new_tokens)
    eos = sorted(loaded.eos)
    sampling_options: dict[str, Any] = {}
    if sampling.temperature:
        torch.manual_seed(sampling.seed)
        sampling_options = {key: getattr(sampling, key) for key in ("temperature", "top_k", "top_p", "min_p")}
    config = GenerationConfig(
        max_new_tokens=limit,
        do_sample=bool(sampling.temperature),
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        **sampling_options,
    )
    with stock_linears(target.model):
        target.synchronize()
        start = time.perf_counter()
        ids = torch.tensor([prompt], device=target.device)
        output = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        tokens = output[0, len(prompt) :].tolist()
        elapsed = time.perf_counter() - start
    stop = "eos" if tokens[-1] in loaded.eos else "length" if limit == max_new_tokens else "context"
    return Generation(tokens, [StepRecord([token], 1, ()) for token in tokens], stop, len(tokens), 0.0, elapsed)
