"""Answer prompts by this engine, by transformers' own generate, or by a server of any engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig

from model.decoder import Decoder
from model.engine import GREEDY, Drafter, Generation, Sampling, StepRecord, exhaust
from model.engine.loop.answer import Mark, unmarked
from model.errors import UserError, one_line
from model.files import load_state, local_path, located
from model.generate import Generate
from model.methods import AUTO, build_drafter, method_class

from ..records.provenance import sha256_of
from ..records.rows import difference
from ..records.runs import INSIDE, NO_SPECULATION, SERVED, SERVER
from .hub import path_of
from .models import LoadedModel
from .server import Reply, Server
from .stock import STATIC, stock_generate

COLD = "cold"
HOT = "hot"
CATEGORY = "category"


@dataclass
class Answerer:
    loaded: LoadedModel
    drafter: Drafter  # keeps the state between prompts; on this engine it also drafts
    # whatever decides the answers, for the run's identity; `name` as in configs/method/
    settings: dict[str, Any]
    execution: str  # how steps are executed, as `model.engine.decode` takes it, or INSIDE
    # cold, hot, category, or the file of a saved state; None if no state is kept
    start: str | None = None
    date: str | None = None  # of its prompts, as `prompt_ids` takes it
    on_engine: ClassVar[bool] = False  # True if answers have step records and phases
    # True if answers have a prefill time and the arrival times of tokens
    streams: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The name in tables; with nodes=auto, without its start if that is hot."""
        words = [AUTO] if self.settings.get("tree") == AUTO else []
        if self.start is not None and not (words and self.start == HOT):
            words.append(Path(self.start).stem)
        name = str(self.settings["name"])
        return f"{name} ({', '.join(words)})" if words else name

    @property
    def keeps_state(self) -> bool:
        """True if an answer depends on the answers before it."""
        return self.start not in (None, COLD)

    def prepare(self) -> None:
        """Set the state for the start of a run. Raises UserError if a saved one does not fit."""
        self.drafter.reset()
        if self.start not in (None, COLD, HOT, CATEGORY):
            self.drafter.load_state_dict(load_state(local_path(str(self.start))))

    def start_from(self, state: Path) -> None:
        """Start from the file of a saved state. Raises UserError if it does not fit."""
        self.start = str(state)
        self.settings |= {"start": self.start, "start_sha256": sha256_of(state)}
        self.prepare()

    def begin(self) -> None:
        """Reset the state if the start is cold; called before each prompt."""
        if self.start == COLD:
            self.drafter.reset()

    def answer(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        mark: Mark = unmarked,
    ) -> Generation:
        """Answer a prompt; by default as a batch of one, in which no phase is marked."""
        return self.answer_batch([prompt], max_new_tokens, [sampling])[0]

    def answer_batch(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        samplings: Sequence[Sampling],
    ) -> list[Generation]:
        """Answer prompts together; each answer gets its share of the seconds (`Generation`)."""
        raise NotImplementedError


class Method(Answerer):
    on_engine = streams = True

    @cached_property
    def decoder(self) -> Decoder:
        inside = self.execution in INSIDE.values()
        return Decoder(
            self.loaded.target,
            method=self.drafter,
            start=COLD if self.start == COLD else HOT,
            eos=self.loaded.eos,
            execution="auto" if inside else self.execution,
        )

    def answer(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        mark: Mark = unmarked,
    ) -> Generation:
        request = self._request(max_new_tokens, sampling) | {"mark": mark}
        return exhaust(self.decoder.decode(prompt, request))

    def answer_batch(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        samplings: Sequence[Sampling],
    ) -> list[Generation]:
        requests = [self._request(max_new_tokens, sampling) for sampling in samplings]
        asked = zip(prompts, requests, strict=True)
        return exhaust(self.decoder.decode_batch(asked, len(prompts)))

    def _request(self, max_new_tokens: int, sampling: Sampling) -> dict[str, Any]:
        return {
            "max_new_tokens": max_new_tokens,
            "eos": self.loaded.eos,
            "sampling": sampling,
            "execution": self.execution,
        }


class InsideGenerate(Method):
    """A method inside transformers' generate: greedy, one prompt at a time."""

    @cached_property
    def custom_generate(self) -> Generate:
        generate = Generate()
        generate.decoder = lambda *_: self.decoder  # type: ignore[method-assign]
        return generate

    def answer(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        mark: Mark = unmarked,
    ) -> Generation:
        """Answer a prompt; what transformers does before and after the steps counts as prefill."""
        target = self.loaded.target
        config = generation_config(
            self.loaded,
            max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        target.synchronize()
        start = time.perf_counter()
        ids = torch.tensor([prompt], device=target.device)
        generated = target.model.generate(
            ids,
            generation_config=config,
            attention_mask=torch.ones_like(ids),
            custom_generate=self.custom_generate,
        )
        out: Generation = generated.generations[0]
        out.prefill_s = time.perf_counter() - start - out.decode_s - out.setup_s
        return out


class TransformersGenerate(Answerer):
    """The paper's baseline, on the stock model; it samples with torch's generator."""

    @property
    def label(self) -> str:
        """The name in tables, with its static cache, with which transformers may compile."""
        return f"{super().label} ({STATIC})" if self.settings.get("compiled") else super().label

    def answer_batch(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        samplings: Sequence[Sampling],
    ) -> list[Generation]:
        """Answer prompts as one batch, sampled with the first prompt's seed.

        If a prompt has no room for `max_new_tokens`, all are answered one by one, as it would
        shorten the others' answers.
        """
        sampling = samplings[0]
        size = len(prompts)
        budget = self.loaded.target.token_budget
        limit = min(budget(prompt, max_new_tokens) for prompt in prompts)

        if limit < max_new_tokens and size > 1:
            asked = zip(prompts, samplings, strict=True)
            return [self.answer(prompt, max_new_tokens, own) for prompt, own in asked]

        drawn: dict[str, Any] = {
            "do_sample": bool(sampling.temperature),
            "repetition_penalty": sampling.repetition_penalty,
        }
        if sampling.temperature:
            for key in ("temperature", "top_k", "top_p", "min_p"):
                drawn[key] = getattr(sampling, key)

        config = generation_config(self.loaded, limit, **drawn)
        compiled = self.settings.get("compiled", False)
        rows, elapsed = stock_generate(self.loaded, prompts, config, compiled, sampling.seed)

        outs = []
        for row in rows:
            ends = [i for i, token in enumerate(row, start=1) if token in self.loaded.eos]
            tokens = row[: ends[0]] if ends else row  # padding follows
            steps = [StepRecord([token], 1, (), batch=size) for token in tokens]
            outs.append(Generation(tokens, steps, forwards=len(tokens), decode_s=elapsed / size))
            outs[-1].end(limit, max_new_tokens, self.loaded.eos)

        return outs


def generation_config(
    loaded: LoadedModel, max_new_tokens: int, **settings: Any
) -> GenerationConfig:
    """Return settings for transformers' generate; EOS ids also pad a batch."""
    eos = sorted(loaded.eos)
    ends = {"eos_token_id": eos or None, "pad_token_id": eos[0] if eos else 0}
    return GenerationConfig(max_new_tokens=max_new_tokens, **ends, **settings)


@dataclass(slots=True)
class ServedAnswer(Generation):
    """An answer of a server, which reports at most the number of steps."""

    said: str | None = None  # the answer's text, if its token ids are not known
    # entries that this answer's record adds or replaces
    recorded: dict[str, Any] = field(default_factory=dict)


@dataclass
class Served(Answerer):
    """A server of any engine: prompts are sent as token ids, or as text that gives the same ids."""

    server: Server = field(kw_only=True)
    said: dict[str, Any] = field(kw_only=True)  # what the server reported about itself at the start
    streams: ClassVar[bool] = True

    @property
    def label(self) -> str:
        engine = self.settings["engine"]
        speculation = self.settings["speculation"]
        if speculation == NO_SPECULATION:
            return str(engine)
        return f"{engine} ({speculation or 'speculation unknown'})"

    def answer(
        self, prompt: list[int], max_new_tokens: int, *greedy: Any, **unmarked: Any
    ) -> Generation:
        """Answer a prompt; the counters of the whole server are read as this request's."""
        return self.answer_batch([prompt], max_new_tokens, alone=True)[0]

    def answer_batch(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        samplings: Sequence[Sampling] = (),
        alone: bool = False,
    ) -> list[Generation]:
        """Answer by concurrent requests. Raises UserError if the server fails or has changed."""
        server = self.server
        now = {key: value or self.said[key] for key, value in server.describe().items()}
        if changed := difference(self.said, now, words=("before", "now")):
            raise self._fault(f"is another one now: {changed}")

        asked = [self._as_taken(prompt) for prompt in prompts]
        limits = [self.loaded.target.token_budget(prompt, max_new_tokens) for prompt in prompts]
        before = server.counters() if alone else {}

        start = time.perf_counter()
        # an error or Ctrl-C ends it without waiting for other requests
        with ThreadPool(len(prompts)) as pool:
            places = zip(range(len(prompts)), asked, limits, strict=True)
            done = pool.imap_unordered(lambda each: (each[0], server.ask(*each[1:])), places)
            replies = [reply for _, reply in sorted(done, key=lambda pair: pair[0])]

        elapsed = time.perf_counter() - start  # the sum of all answers' times

        share = 1.0 if alone else elapsed / sum(times[-1] for _, times in replies)
        after = server.counters() if alone else {}
        moved = {name: value - before.get(name, 0.0) for name, value in after.items() if before}

        outs = []
        for prompt, limit, (reply, times) in zip(prompts, limits, replies, strict=True):
            if self.settings["speculation"] == NO_SPECULATION and reply.accepted is None:
                reply.accepted = 0
            server.kind.count(moved, reply)
            tokens = self._checked(reply, prompt, limit)
            full = "length" if limit == max_new_tokens else "context"
            recorded = {
                "new_tokens": reply.tokens,
                "engine_means": reply.means,
                "decoding_steps": reply.steps,
                "first_tokens": reply.first_tokens,
                "first_token_time": times[0],
            }
            out = ServedAnswer(
                tokens,
                prefill_s=times[0] * share,
                decode_s=(times[-1] - times[0]) * share,
                ends_s=times,
                forwards=reply.steps or 0,
                stop="eos" if reply.finish == "stop" else full,
                said=None if reply.ids else reply.text,
                recorded=recorded,
            )
            outs.append(out)

        return list[Generation](outs)

    def _checked(self, reply: Reply, prompt: list[int], limit: int) -> list[int]:
        """Return an answer's ids up to its end; [] if the engine gives only their number.

        Raises UserError if the reply does not fit the request.
        """
        loaded = self.loaded
        ids = reply.ids
        shown = bool(loaded.eos.intersection(ids[-1:]))  # EOS is among the ids
        if not reply.finish and (shown or max(len(ids), reply.tokens) >= limit):
            reply.finish = "stop" if shown else "length"
        # an EOS that is not among the ids
        hidden = reply.finish == "stop" and not shown and bool(loaded.eos)
        stop = one_line(str(reply.stopped_by))[:40]
        most = max(len(ids), reply.tokens - hidden)
        # EOS counts, or not
        fits = not reply.tokens or len(ids) - shown <= reply.tokens <= len(ids) + hidden
        few_ids = bool(ids) and not fits  # as inside a character
        known = range(loaded.target.vocab_size)

        faults = {
            f"read {reply.prompt_tokens} tokens where the prompt has {len(prompt)}": (
                reply.prompt_tokens not in (None, len(prompt))
            ),
            f"is another one now: speculation is {reply.speculation}": (
                reply.speculation not in (None, self.said["speculation"])
            ),
            "an answer has no end: the stream broke off": not reply.finish,
            f"an answer has no end: the engine says {reply.finish}": (
                reply.finish not in ("stop", "length")
            ),
            f"stopped at {stop}, which is no EOS here": (
                hidden and reply.stopped_by not in (None, *loaded.eos)
            ),
            "gives neither token ids nor their number": not (ids or reply.tokens),
            f"gives {len(ids)} ids of {reply.tokens} tokens": (
                few_ids and (not reply.text or reply.tokens < len(ids))
            ),
            # their time would be that of fewer
            f"gives {most} tokens where {limit} were asked for": most > limit,
            f"stopped after {reply.tokens} tokens of {limit}; has it a shorter context?": (
                reply.finish == "length" and not shown and 0 < reply.tokens < limit
            ),
            f"gives ids outside the vocabulary of {len(known)}": (
                not few_ids and not all(token in known for token in ids)
            ),
            "gives tokens behind one that is EOS of the model here": (
                not few_ids and bool(loaded.eos.intersection(ids[:-1]))
            ),
        }
        for words, is_so in faults.items():
            if is_so:
                raise self._fault(words)

        if few_ids or not ids:
            reply.ids = []
            return []
        if hidden:  # it took a step, too
            own = loaded.tokenizer.eos_token_id
            ids.append(own if own in loaded.eos else min(loaded.eos))
        reply.tokens = min(len(ids), limit)
        return ids[:limit]

    def _fault(self, words: str) -> UserError:
        return UserError(f"{self.server.where}: {words}")

    def _as_taken(self, prompt: list[int]) -> list[int] | str:
        if self.server.kind.takes_ids:
            return prompt
        tokenizer = self.loaded.tokenizer
        text = tokenizer.decode(prompt)

        # most servers add BOS to a text
        for exact in (text, text.removeprefix(tokenizer.bos_token or "")):
            if list(tokenizer(exact).input_ids) == prompt:
                return str(exact)

        raise self._fault("takes texts alone, and no text gives exactly this prompt's tokens")


def build_answerer(
    loaded: LoadedModel,
    method: dict[str, Any],
    tree: dict[str, Any],
    start: str,
    execution: str,
) -> Answerer:
    """Build the answerer that a run's settings name.

    Args:
        method: `name`, `drafter` (a shipped method's name, an import path or `server`; None:
            transformers' own generate), and keyword arguments of the drafter or the server.
        tree: `name` and parameters of a template.
        start: cold | hot | category | path of a saved state; ignored by methods without state.

    Raises UserError for an unknown drafter, start, setting or value.
    """
    settings = dict(method)
    options = {key: method[key] for key in method if key not in ("name", "drafter")}
    if method["drafter"] == SERVER:
        return build_served(loaded, settings, Server(**options))
    if method["drafter"] is None:
        return TransformersGenerate(loaded, Drafter(loaded.target.device), settings, execution)

    named = [key for key in options if key.endswith("path") and isinstance(options[key], str)]
    paths = {key: path_of(key, options[key]) for key in named}
    options |= {key: str(path) for key, path in paths.items()}

    factory = method_class(method["drafter"])
    drafter = build_drafter(factory, loaded.target, options, eos=loaded.eos, tree=tree)

    if drafter.sizing is not None:
        settings |= {"tree": AUTO, "nodes": drafter.sizing.sizes[-1]}
    for key, path in paths.items():
        if located(method[key]).exists():
            settings[f"{key}_sha256"] = sha256_of(path)
        else:  # the snapshot of a repository on the hub
            settings[f"{key}_commit"] = path.name
    if drafter.draft_tree is not None:
        nodes = [list(path) for path in drafter.draft_tree.rank_paths[1:]]
        digest = hashlib.sha256(repr(nodes).encode()).hexdigest()
        settings |= {"tree": tree["name"], "tree_nodes": len(nodes), "tree_sha256": digest}

    if drafter.stateful:
        settings["start"] = start
    answers_by = InsideGenerate if execution in INSIDE.values() else Method
    built = answers_by(loaded, drafter, settings, execution, start if drafter.stateful else None)
    if built.start not in (None, COLD, HOT, CATEGORY):
        state = local_path(start)
        if not state.is_file():
            raise UserError(
                f"start={start}: must be cold, hot, category or the file of a saved state"
            )
        built.start_from(state)
    return built


def build_served(loaded: LoadedModel, settings: dict[str, Any], server: Server) -> Served:
    """Build the answerer of a server; one that takes token ids is first asked for one token.

    Raises UserError if the server fails, its context is too short, or `speculation` is wrong.
    """
    said = server.describe()
    asked = server.speculation

    if server.kind.takes_ids:
        drafts = server.ask([0], 1)[0].speculation
        said = server.describe()  # a router has loaded the model now
        said["speculation"] = drafts or said["speculation"]

    context = said["context"]
    if context is not None and context < loaded.target.context:
        most = f"has a context of {context} tokens, and the model {loaded.target.context}"
        raise UserError(
            f"{server.where}: {most}; start it with a longer one, or say model.context={context}"
        )

    reported = said["speculation"]
    contradicts = (asked == NO_SPECULATION) != (reported == NO_SPECULATION)
    if asked and reported and contradicts:
        raise UserError(f"method.speculation={asked}: {server.where} says {reported}")

    settings |= said | {"speculation": asked or reported, "url": server.url}
    for decides_no_answer in ("timeout", "context", "dtype", "audit"):
        del settings[decides_no_answer]
    return Served(loaded, Drafter(loaded.target.device), settings, SERVED, server=server, said=said)
