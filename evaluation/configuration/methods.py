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
from model.engine.devices import without_cudnn
from model.engine.linear import stock_linears
from model.engine.sampling import GREEDY, Sampling
from model.engine.sizing import finds_size
from model.engine.step import unmarked
from model.errors import UserError
from model.files import load_state
from model.methods import METHODS, method_class
from model.recycling import TokenRecycling, build_template
from model.settings import check_settings

from ..loading.digests import sha256_of
from ..loading.models import LoadedModel
from .config import path_of

COLD, HOT, CATEGORY = "cold", "hot", "category"
AUTO = "auto"  # the tree whose size is found while decoding
RANKS = 32  # children per node that a template may have if the method has no k


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
    execution: str

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
    loaded: LoadedModel, method: dict[str, Any], tree: dict[str, Any], start: str, execution: str
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
        UserError: unknown drafter, start, setting or value, a tree that does not fit k.
    """
    options = {key: value for key, value in method.items() if key not in ("name", "drafter")}
    texts = {key: value for key, value in options.items() if key.endswith("path") and isinstance(value, str)}
    paths = {key: path_of(key, value) for key, value in texts.items()}
    settings = dict(method)
    drafter: Drafter | None = None
    template: Tree | None = None
    if method["drafter"] is not None:
        options |= {key: str(path) for key, path in paths.items()}
        drafter, template, sized = _build_drafter(drafter_class(method["drafter"]), loaded, tree, options)
        settings |= sized
    settings |= {f"{key}_sha256": sha256_of(path) for key, path in paths.items()}
    if template is not None:
        nodes = [list(path) for path in template.rank_paths[1:]]
        digest = hashlib.sha256(repr(nodes).encode()).hexdigest()
        settings |= {"tree": tree["name"], "tree_nodes": len(nodes), "tree_sha256": digest}
    stateful = drafter is not None and drafter.stateful
    if stateful:
        settings["start"] = start
        if start not in (COLD, HOT, CATEGORY):
            if not Path(start).is_file():
                raise UserError(f"start={start}: must be cold, hot, category or the file of a saved state")
            settings["start_sha256"] = sha256_of(Path(start))
    built = Method(method["name"], loaded, drafter, start if stateful else None, template, settings, execution)
    built.prepare()  # raises now if a saved state does not fit
    return built


def _build_drafter(
    factory: Callable[..., Any], loaded: LoadedModel, tree: dict[str, Any], options: dict[str, Any]
) -> tuple[Drafter, Tree | None, dict[str, Any]]:
    """Build a drafter by its options and what its signature asks for.

    Returns:
        Also its template, and how settings record a size that it finds while decoding.
    """
    target = loaded.target
    offered = {"vocab_size": target.vocab_size, "device": target.device, "eos": loaded.eos, "target": target}
    check_settings(options, factory, "method.", without={*offered, "tree", "sizing"})
    if isinstance(options.get("nodes"), str):
        raise UserError(f"method.nodes={options['nodes']}: must be a number; tree=auto finds it while decoding")
    takes_tree, template, sized = "tree" in inspect.signature(factory).parameters, None, {}
    if tree["name"] == AUTO and (takes_tree or finds_size(factory)):
        _check_auto(factory, tree)
        options |= {"nodes": f"{AUTO}:{tree['nodes']}"}
        sized = {"tree": AUTO, "nodes": tree["nodes"]}
    elif takes_tree:
        offered["tree"] = template = build_template(**tree, k=options.get("k", RANKS))
    parameters = inspect.signature(factory).parameters
    drafter = factory(**{key: value for key, value in offered.items() if key in parameters} | options)
    if not isinstance(drafter, Drafter):
        raise UserError(f"method.drafter: {factory.__name__} does not make a drafter (model.engine.Drafter)")
    if type(drafter).session is Drafter.session:
        raise UserError(f"method.drafter: {factory.__name__} has no sessions; derive from DeviceDrafter, or write one")
    return drafter, drafter.largest if type(drafter) is TokenRecycling else template, sized


def _check_auto(factory: Callable[..., Any], tree: dict[str, Any]) -> None:
    """Raise UserError if a method's drafts have a fixed size, or tree=auto has more than a budget of nodes."""
    if not finds_size(factory):
        raise UserError("tree=auto: is for methods whose drafts have any size; with this one name a template")
    unused = [key for key in ("depth", "branching", "path") if tree[key] is not None]
    if unused or not isinstance(tree["nodes"], int) or tree["nodes"] < 1:
        wrong = unused or tree["nodes"]
        raise UserError(f"tree=auto takes tree.nodes, a budget of at least 1, and nothing else ({wrong})")


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
    with stock_linears(target.model), without_cudnn(target.device):
        target.synchronize()
        start = time.perf_counter()
        ids = torch.tensor([prompt], device=target.device)
        output = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        tokens = output[0, len(prompt) :].tolist()
        elapsed = time.perf_counter() - start
    stop = "eos" if tokens[-1] in loaded.eos else "length" if limit == max_new_tokens else "context"
    return Generation(tokens, [StepRecord([token], 1, ()) for token in tokens], stop, len(tokens), 0.0, elapsed)
