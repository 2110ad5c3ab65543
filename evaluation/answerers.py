"""What answers prompts: a method on this engine, or transformers' own generate.

A run knows an `Answerer` alone: another kind is one more class here. Which conversations go on together, those of a
batch or of methods that share forwards, `running.answering.answer_turn` decides.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig

from model.engine import Drafter, Generation, StepRecord, generate
from model.engine.batch import decode_batch
from model.engine.devices import without_cudnn
from model.engine.linear import stock_linears
from model.engine.loop import Request, whole
from model.engine.sampling import GREEDY, Sampling
from model.engine.sizing import finds_size
from model.engine.step import Mark, unmarked
from model.errors import UserError
from model.files import load_state
from model.methods import AUTO, build_drafter, method_class, takes_tree

from .loading.companions import path_of
from .loading.models import LoadedModel
from .records.provenance import sha256_of

COLD, HOT, CATEGORY = "cold", "hot", "category"


@dataclass
class Answerer:
    """What answers prompts, one after the other."""

    loaded: LoadedModel
    drafter: Drafter  # holds the state between prompts; on this engine it drafts, too
    settings: dict[str, Any]  # all that decides the answers, for the run's identity; `name` is as in configs/method/
    execution: str  # of its steps, as `model.engine.decode` takes it
    start: str | None = None  # cold, hot, category, or the file of a saved state; None if no state is kept
    on_engine: ClassVar[bool] = False  # True if answers have step records, phases and a prefill time

    @property
    def label(self) -> str:
        """The name in tables, with the start where state is kept; tree=auto is hot unless it says cold."""
        words = [AUTO] if self.settings.get("tree") == AUTO else []
        if self.start is not None and not (words and self.start == HOT):
            words.append(Path(self.start).stem)
        return f"{self.settings['name']} ({', '.join(words)})" if words else str(self.settings["name"])

    @property
    def keeps_state(self) -> bool:
        """True if an answer depends on the answers before it."""
        return self.start not in (None, COLD)

    def prepare(self) -> None:
        """Set the state at the start of a run. Raises UserError if a saved one does not fit."""
        self.drafter.reset()
        if self.start not in (None, COLD, HOT, CATEGORY):
            self.drafter.load_state_dict(load_state(Path(str(self.start))))

    def begin(self) -> None:
        """Before each prompt: forget the ones before it if the start is cold."""
        if self.start == COLD:
            self.drafter.reset()

    def answer(
        self, prompt: list[int], max_new_tokens: int, sampling: Sampling = GREEDY, mark: Mark = unmarked
    ) -> Generation:
        """Answer a prompt; limit, sampling and mark as `generate` takes them."""
        raise NotImplementedError

    def answer_batch(
        self, prompts: Sequence[list[int]], max_new_tokens: int, samplings: Sequence[Sampling]
    ) -> list[Generation]:
        """Answer prompts together, each with its own sampling; seconds are shares, as `Generation` says."""
        raise NotImplementedError


class Method(Answerer):
    """A method on this engine."""

    on_engine = True

    def answer(
        self, prompt: list[int], max_new_tokens: int, sampling: Sampling = GREEDY, mark: Mark = unmarked
    ) -> Generation:
        self.begin()
        asked: dict[str, Any] = dict(max_new_tokens=max_new_tokens, eos=self.loaded.eos, sampling=sampling, mark=mark)
        return generate(self.loaded.target, self.drafter, prompt, execution=self.execution, **asked)

    def answer_batch(
        self, prompts: Sequence[list[int]], max_new_tokens: int, samplings: Sequence[Sampling]
    ) -> list[Generation]:
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos": self.loaded.eos, "execution": self.execution}
        asked = ((prompt, Request(sampling=own, **how)) for prompt, own in zip(prompts, samplings, strict=True))
        return whole(decode_batch(self.loaded.target, self.drafter, asked, len(prompts)))


class TransformersGenerate(Answerer):
    """transformers' generate with torch's own linear layers: the paper's baseline. It draws with torch's generator."""

    def answer(
        self, prompt: list[int], max_new_tokens: int, sampling: Sampling = GREEDY, mark: Mark = unmarked
    ) -> Generation:
        """Answer a prompt. Each token is one step, and no phase is marked."""
        return self.answer_batch([prompt], max_new_tokens, [sampling])[0]

    def answer_batch(
        self, prompts: Sequence[list[int]], max_new_tokens: int, samplings: Sequence[Sampling]
    ) -> list[Generation]:
        """Answer prompts as one batch, padded on the left. It draws by the first one's seed.

        A prompt with less room than `max_new_tokens` is answered alone: its context would end the others' answers.
        """
        target, eos, sampling, size = self.loaded.target, sorted(self.loaded.eos), samplings[0], len(prompts)
        limits, width = [target.token_budget(prompt, max_new_tokens) for prompt in prompts], max(map(len, prompts))
        limit = min(limits)
        if limit < max_new_tokens and size > 1:
            asked = list(zip(prompts, samplings, limits, strict=True))
            fitting = [each[:2] for each in asked if each[2] == max_new_tokens]
            together = self.answer_batch([p for p, _ in fitting], max_new_tokens, [s for _, s in fitting])
            rest = iter(together)
            alone = [None if room == max_new_tokens else self.answer(p, max_new_tokens, s) for p, s, room in asked]
            return [out or next(rest) for out in alone]
        drawn: dict[str, Any] = {}
        if sampling.temperature:
            torch.manual_seed(sampling.seed)
            drawn = {key: getattr(sampling, key) for key in ("temperature", "top_k", "top_p", "min_p")}
        config = GenerationConfig(
            max_new_tokens=limit,
            do_sample=bool(sampling.temperature),
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=eos or None,
            pad_token_id=(pad := eos[0] if eos else 0),
            **drawn,
        )
        with stock_linears(target.model), without_cudnn(target.device):
            target.synchronize()
            start = time.perf_counter()
            left = [width - len(prompt) for prompt in prompts]  # padding
            ids = torch.tensor([[pad] * n + p for n, p in zip(left, prompts, strict=True)], device=target.device)
            seen = torch.tensor([[0] * n + [1] * (width - n) for n in left], device=target.device)
            rows = target.model.generate(ids, attention_mask=seen, generation_config=config)[:, width:].tolist()
            elapsed = time.perf_counter() - start
        outs = []
        for row in rows:
            ends = [i for i, token in enumerate(row, start=1) if token in self.loaded.eos]
            tokens = row[: ends[0]] if ends else row  # behind it is padding
            steps = [StepRecord([token], 1, (), batch=size) for token in tokens]
            outs.append(Generation(tokens, steps, forwards=len(tokens), decode_s=elapsed / size))
            outs[-1].end(limit, max_new_tokens, self.loaded.eos)
        return outs


def build_answerer(
    loaded: LoadedModel, method: dict[str, Any], tree: dict[str, Any], start: str, execution: str
) -> Answerer:
    """Build what a run's settings name.

    Args:
        method: `name`, `drafter` (a shipped method's name or an import path; None: transformers' own generate), and the
            drafter's keyword arguments.
        tree: `name` and parameters of a template, for methods that draft from one.
        start: cold | hot | category | path of a saved state; ignored by methods without state.

    Raises:
        UserError: unknown drafter, start, setting or value, a tree that does not fit k.
    """
    settings, options = dict(method), {key: value for key, value in method.items() if key not in ("name", "drafter")}
    if method["drafter"] is None:
        return TransformersGenerate(loaded, Drafter(loaded.target.device), settings, execution)
    files = {key: value for key, value in options.items() if key.endswith("path") and isinstance(value, str)}
    paths = {key: path_of(key, value) for key, value in files.items()}
    options |= {key: str(path) for key, path in paths.items()}
    factory, is_auto = method_class(method["drafter"]), tree["name"] == AUTO
    if is_auto and finds_size(factory):
        unused = [key for key in ("depth", "branching", "path") if tree[key] is not None]
        if unused or (tree["nodes"] or 0) < 1:
            wrong = unused or tree["nodes"]
            raise UserError(f"tree=auto takes tree.nodes, a budget of at least 1, and nothing else ({wrong})")
        options["nodes"] = f"{AUTO}:{tree['nodes']}"
        settings |= {"tree": AUTO, "nodes": tree["nodes"]}
    elif isinstance(options.get("nodes"), str):
        raise UserError(f"method.nodes={options['nodes']}: must be a number; tree=auto finds it while decoding")
    elif is_auto and takes_tree(factory):
        raise UserError("tree=auto: is for methods whose drafts have any size; with this one name a template")
    drafter = build_drafter(factory, loaded.target, options, eos=loaded.eos, tree=None if is_auto else tree)
    settings |= {f"{key}_sha256": sha256_of(path) for key, path in paths.items()}
    if drafter.draft_tree is not None:
        nodes = [list(path) for path in drafter.draft_tree.rank_paths[1:]]
        digest = hashlib.sha256(repr(nodes).encode()).hexdigest()
        settings |= {"tree": tree["name"], "tree_nodes": len(nodes), "tree_sha256": digest}
    if drafter.stateful:
        settings["start"] = start
        if start not in (COLD, HOT, CATEGORY):
            if not Path(start).is_file():
                raise UserError(f"start={start}: must be cold, hot, category or the file of a saved state")
            settings["start_sha256"] = sha256_of(Path(start))
    built = Method(loaded, drafter, settings, execution, start if drafter.stateful else None)
    built.prepare()  # raises now if a saved state does not fit
    return built
