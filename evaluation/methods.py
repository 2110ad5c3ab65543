"""A method ready to answer prompts: a drafter on the engine, or transformers' own generate."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from model.auto import AutoRecycling
from model.decoding import Drafter, Generation, StepRecord, Tree, decode
from model.errors import UserError
from model.pld import PromptLookup
from model.recycling import TokenRecycling, build_template
from model.recycling.matrix import load_state
from model.vanilla import Vanilla

from .models import LoadedModel
from .step_times import step_seconds

COLD, HOT = "cold", "hot"
AUTO = "auto"  # the tree that is chosen for the machine


@dataclass
class Method:
    """One way to answer prompts.

    Attributes:
        name: of the method, as in configs/method/.
        drafter: None for `hf`, which does not run on this engine.
        start: cold, hot, or the file of a saved state; None where nothing is carried from prompt to prompt.
        tree: None where the method has no template.
        settings: everything that decides the output, for the run's fingerprint.
    """

    name: str
    loaded: LoadedModel
    drafter: Drafter | None
    start: str | None
    tree: Tree | None
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        """How tables name it: a method that carries state names its start; tree=auto is hot unless it says cold."""
        if self.start is None:
            return self.name
        start = Path(self.start).stem
        if self.settings.get("tree") == AUTO:
            start = AUTO if self.start == HOT else f"{AUTO}, {start}"
        return f"{self.name} ({start})"

    def prepare(self) -> None:
        """The state at the start of a run."""
        if self.drafter is not None:
            self.drafter.reset()
            if self.start not in (None, COLD, HOT):
                self.drafter.load_state_dict(load_state(Path(str(self.start))))

    def answer(self, prompt: list[int], max_new_tokens: int) -> Generation:
        """Answer one prompt; a cold start forgets what was before."""
        if self.drafter is None:
            return _transformers_generate(self.loaded, prompt, max_new_tokens)
        if self.start == COLD:
            self.drafter.reset()
        return decode(self.loaded.target, self.drafter, prompt, max_new_tokens=max_new_tokens, eos=self.loaded.eos)


def build_method(loaded: LoadedModel, method: dict[str, Any], tree: dict[str, Any], start: str) -> Method:
    """Build the method that the settings describe.

    Args:
        method: `name` and the method's own settings.
        tree: `name` and parameters of a template; used by methods that draft from one.
        start: cold | hot | path of a saved state; methods without state have neither.

    Raises:
        UserError: unknown name, start or value, a tree that does not fit k.
    """
    name, own = method["name"], {key: value for key, value in method.items() if key != "name"}
    target = loaded.target
    template: Tree | None = None
    drafter: Drafter | None
    if name == "hf":
        drafter = None
    elif name == "vanilla":
        drafter = Vanilla(target.device)
    elif name == "pld":
        drafter = PromptLookup(**own, eos=loaded.eos, device=target.device)
    elif name == "recycling":
        dtypes = {"int64": torch.int64, "int32": torch.int32}
        if own["dtype"] not in dtypes:
            raise UserError(f"method.dtype={own['dtype']}: the matrix is int64 or int32")
        if not isinstance(own["k"], int) or own["k"] < 1:
            raise UserError(f"method.k={own['k']}: must be a whole number, at least 1")
        own_dtype = own | {"dtype": dtypes[own["dtype"]], "device": target.device}
        if tree["name"] == AUTO:
            drafter = _auto(loaded, tree, own_dtype)
            template = drafter.largest
        else:
            template = build_template(**tree, k=own["k"])
            drafter = TokenRecycling(target.vocab_size, template, **own_dtype)
    else:
        raise UserError(f"method.name={name}: no such method; there are hf, vanilla, pld, recycling")
    stateful = drafter is not None and drafter.stateful
    settings: dict[str, Any] = {"name": name, **own}
    if template is not None:
        nodes = [list(path) for path in template.rank_paths[1:]]
        settings |= {"tree": tree["name"], "tree_nodes": len(nodes), "tree_sha256": _sha256(repr(nodes).encode())}
    if stateful:
        settings["start"] = start
        if start not in (COLD, HOT):
            if not Path(start).is_file():
                raise UserError(f"start={start}: must be cold, hot or the file of a saved state; there is no such file")
            settings["start_sha256"] = _sha256(Path(start).read_bytes())
    made = Method(name, loaded, drafter, start if stateful else None, template, settings)
    made.prepare()  # a saved state that does not fit is told now
    return made


def _auto(loaded: LoadedModel, tree: dict[str, Any], own: dict[str, Any]) -> AutoRecycling:
    """Recycling whose tree follows the machine; its step times are measured once a machine, model and setting."""
    unused = [key for key in ("depth", "branching", "path") if tree[key] is not None]
    if unused or not isinstance(tree["nodes"], int) or tree["nodes"] < 0:
        raise UserError(
            f"tree=auto takes tree.nodes, a budget of at least 0, and nothing else ({unused or tree['nodes']})"
        )
    seconds = step_seconds(loaded, budget=tree["nodes"], k=own["k"])
    return AutoRecycling(loaded.target.vocab_size, step_seconds=seconds, budget=tree["nodes"], **own)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _transformers_generate(loaded: LoadedModel, prompt: list[int], max_new_tokens: int) -> Generation:
    """transformers' own greedy decoding, the baseline the paper compares with. One step a token."""
    target = loaded.target
    if max_new_tokens < 1 or not 1 <= len(prompt) < target.context:
        raise UserError(
            f"prompt of {len(prompt)} tokens: must have 1 to {target.context - 1} (context {target.context})"
        )
    limit = min(max_new_tokens, target.context - len(prompt))
    eos = sorted(loaded.eos)
    config = GenerationConfig(
        max_new_tokens=limit, do_sample=False, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0
    )
    target.synchronize()
    start = time.perf_counter()
    ids = torch.tensor([prompt], device=target.device)
    output = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens = output[0, len(prompt) :].tolist()
    elapsed = time.perf_counter() - start
    stop = "eos" if tokens[-1] in loaded.eos else "length" if limit == max_new_tokens else "context"
    return Generation(tokens, [StepRecord(1, 1, ()) for _ in tokens], stop, len(tokens), 0.0, elapsed)
