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
from .stock import STATIC, StockSettings, assisted_generate, stock_drafts, stock_generate

COLD = "cold"
HOT = "hot"
CATEGORY = "category"
STARTS = (None, COLD, HOT, CATEGORY)  # all others are files of saved states


@dataclass
class Answerer:
    loaded: LoadedModel
    drafter: Drafter  # keeps the state between prompts; on this engine it also drafts
    # whatever decides the answers, for the run's identity; never edited in place
    settings: dict[str, Any]
    execution: str  # how steps are executed, as `model.engine.decode` takes it, or INSIDE
    start: str | None = None  # one of STARTS or a file; None if no state is kept
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
        if self.start not in STARTS:
            self.drafter.load_state_dict(load_state(local_path(str(self.start))))

    def start_from(self, state: Path) -> None:
        """Start from the file of a saved state. Raises UserError if it does not fit."""
        self.start = str(state)
        self.settings = self.settings | {"start": self.start, "start_sha256": sha256_of(state)}
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
        pairs = zip(prompts, requests, strict=True)
        return exhaust(self.decoder.decode_batch(pairs, len(prompts)))

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


@dataclass
class TransformersGenerate(Answerer):
    """transformers' generate on the stock model; without its own drafts, the paper's baseline.

    It samples with torch's generator.
    """

    drafts: dict[str, Any] = field(default_factory=dict)  # as `assisted_generate` takes it

    @property
    def label(self) -> str:
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
        loaded = self.loaded
        size = len(prompts)
        limit = min(loaded.target.token_budget(prompt, max_new_tokens) for prompt in prompts)
        if limit < max_new_tokens and size > 1:
            pairs = zip(prompts, samplings, strict=True)
            return [self.answer(prompt, max_new_tokens, sampling) for prompt, sampling in pairs]

        sampling = samplings[0]
        sampled: dict[str, Any] = {
            "do_sample": bool(sampling.temperature),
            "repetition_penalty": sampling.repetition_penalty,
        }
        if sampling.temperature:
            for key in ("temperature", "top_k", "top_p", "min_p"):
                sampled[key] = getattr(sampling, key)
            sampled["temperature"] = float(sampling.temperature)  # transformers refuses integers

        config = generation_config(loaded, limit, **sampled)
        if self.drafts:  # one prompt, as transformers drafts for one sequence
            accepted, elapsed = assisted_generate(
                loaded, prompts[0], config, sampling.seed, **self.drafts
            )
            out = Generation(decode_s=elapsed, forwards=len(accepted))
            for tokens, nodes in accepted:
                out.tokens += tokens
                out.steps.append(StepRecord(tokens, nodes, (0,) * (len(tokens) - 1)))
            out.end(limit, max_new_tokens, loaded.eos)
            return [out]

        compiled = self.settings.get("compiled", False)
        rows, elapsed = stock_generate(loaded, prompts, config, compiled, sampling.seed)

        outs = []
        for row in rows:
            ends = [i for i, token in enumerate(row, start=1) if token in loaded.eos]
            tokens = row[: ends[0]] if ends else row  # padding follows
            steps = [StepRecord([token], 1, (), batch=size) for token in tokens]
            out = Generation(tokens, steps, forwards=len(tokens), decode_s=elapsed / size)
            out.end(limit, max_new_tokens, loaded.eos)
            outs.append(out)

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

    text: str | None = None  # if its token ids are not known
    # entries that this answer's record adds or replaces
    recorded: dict[str, Any] = field(default_factory=dict)


@dataclass
class Served(Answerer):
    """A server of any engine: prompts are sent as token ids, or as text that gives the same ids."""

    server: Server = field(kw_only=True)
    properties: dict[str, Any] = field(kw_only=True)  # as the server reported them at the start
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
        reported = server.describe()
        now = {key: value or self.properties[key] for key, value in reported.items()}
        if changed := difference(self.properties, now, words=("before", "now")):
            raise self._fault(f"is another one now: {changed}")

        limits = [self.loaded.target.token_budget(prompt, max_new_tokens) for prompt in prompts]
        sent = [self._sent(prompt) for prompt in prompts]
        requests = enumerate(zip(sent, limits, strict=True))
        before = server.counters() if alone else {}

        start = time.perf_counter()
        # unordered: an error or Ctrl-C ends it without waiting for other requests
        with ThreadPool(len(prompts)) as pool:
            replies = dict(pool.imap_unordered(lambda one: (one[0], server.ask(*one[1])), requests))
        elapsed = time.perf_counter() - start  # the sum of all answers' times

        share = 1.0 if alone else elapsed / sum(times[-1] for _, times in replies.values())
        after = server.counters() if before else {}
        increase = {name: value - before.get(name, 0.0) for name, value in after.items()}

        outs: list[Generation] = []
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            reply, times = replies[i]
            if self.settings["speculation"] == NO_SPECULATION and reply.accepted is None:
                reply.accepted = 0
            server.kind.count(increase, reply)
            tokens = self._checked(reply, prompt, limit)
            full = "length" if limit == max_new_tokens else "context"
            out = ServedAnswer(
                tokens,
                prefill_s=times[0] * share,
                decode_s=(times[-1] - times[0]) * share,
                ends_s=times,
                forwards=reply.steps or 0,
                stop="eos" if reply.finish == "stop" else full,
                text=None if reply.ids else reply.text,
                recorded={
                    "new_tokens": reply.tokens,
                    "engine_means": reply.means,
                    "decoding_steps": reply.steps,
                    "first_tokens": reply.first_tokens,
                    "first_token_time": times[0],
                },
            )
            outs.append(out)

        return outs

    def _checked(self, reply: Reply, prompt: list[int], limit: int) -> list[int]:
        """Return an answer's ids up to its end; [] if the engine gives only their number.

        Raises UserError if the reply does not fit the request.
        """
        loaded = self.loaded
        ids = reply.ids
        has_eos = bool(loaded.eos.intersection(ids[-1:]))
        if not reply.finish and (has_eos or max(len(ids), reply.tokens) >= limit):
            reply.finish = "stop" if has_eos else "length"
        hides_eos = reply.finish == "stop" and not has_eos and bool(loaded.eos)

        # engines count EOS, or not
        fits = not reply.tokens or len(ids) - has_eos <= reply.tokens <= len(ids) + hides_eos
        lacks_ids = bool(ids) and not fits  # as inside a character
        count = max(len(ids), reply.tokens - hides_eos)
        known = range(loaded.target.vocab_size)
        stop = one_line(str(reply.stopped_by))[:40]

        faults = {
            f"read {reply.prompt_tokens} tokens where the prompt has {len(prompt)}": (
                reply.prompt_tokens not in (None, len(prompt))
            ),
            f"is another one now: speculation is {reply.speculation}": (
                reply.speculation not in (None, self.properties["speculation"])
            ),
            "an answer has no end: the stream broke off": not reply.finish,
            f"an answer has no end: the engine says {reply.finish}": (
                reply.finish not in ("stop", "length")
            ),
            f"stopped at {stop}, which is no EOS here": (
                hides_eos and reply.stopped_by not in (None, *loaded.eos)
            ),
            "gives neither token ids nor their number": not (ids or reply.tokens),
            f"gives {len(ids)} ids of {reply.tokens} tokens": (
                lacks_ids and (not reply.text or reply.tokens < len(ids))
            ),
            # their time would be that of fewer
            f"gives {count} tokens where {limit} were asked for": count > limit,
            f"stopped after {reply.tokens} tokens of {limit}; has it a shorter context?": (
                reply.finish == "length" and not has_eos and 0 < reply.tokens < limit
            ),
            f"gives ids outside the vocabulary of {len(known)}": (
                not lacks_ids and not all(token in known for token in ids)
            ),
            "gives tokens behind one that is EOS of the model here": (
                not lacks_ids and bool(loaded.eos.intersection(ids[:-1]))
            ),
        }
        for words, is_so in faults.items():
            if is_so:
                raise self._fault(words)

        if lacks_ids or not ids:
            reply.ids = []
            return []
        if hides_eos:  # it took a step, too
            eos = loaded.tokenizer.eos_token_id
            ids.append(eos if eos in loaded.eos else min(loaded.eos))
        reply.tokens = min(len(ids), limit)
        return ids[:limit]

    def _fault(self, words: str) -> UserError:
        return UserError(f"{self.server.where}: {words}")

    def _sent(self, prompt: list[int]) -> list[int] | str:
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
    options = {key: value for key, value in method.items() if key not in ("name", "drafter")}
    if method["drafter"] == SERVER:
        return build_served(loaded, method, Server(**options))

    files = {
        key: path_of(key, value)
        for key, value in options.items()
        if key.endswith("path") and isinstance(value, str)
    }
    options |= {key: str(path) for key, path in files.items()}
    settings = dict(method)
    for key, path in files.items():
        if located(method[key]).exists():
            settings[f"{key}_sha256"] = sha256_of(path)
        else:  # the snapshot of a repository on the hub
            settings[f"{key}_commit"] = path.name

    if method["drafter"] is None:
        drafts = stock_drafts(loaded, StockSettings(**options))
        plain = Drafter(loaded.target.device)
        return TransformersGenerate(loaded, plain, settings, execution, drafts=drafts)

    factory = method_class(method["drafter"])
    drafter = build_drafter(factory, loaded.target, options, eos=loaded.eos, tree=tree)
    if drafter.sizing is not None:
        settings |= {"tree": AUTO, "nodes": drafter.sizing.sizes[-1]}
    if drafter.draft_tree is not None:
        nodes = [list(path) for path in drafter.draft_tree.rank_paths[1:]]
        digest = hashlib.sha256(repr(nodes).encode()).hexdigest()
        settings |= {"tree": tree["name"], "tree_nodes": len(nodes), "tree_sha256": digest}
    if drafter.stateful:
        settings["start"] = start

    kind = InsideGenerate if execution in INSIDE.values() else Method
    answerer = kind(loaded, drafter, settings, execution, start if drafter.stateful else None)
    if answerer.start not in STARTS:
        state = local_path(start)
        if not state.is_file():
            raise UserError(
                f"start={start}: must be cold, hot, category or the file of a saved state"
            )
        answerer.start_from(state)
    return answerer


def build_served(loaded: LoadedModel, method: dict[str, Any], server: Server) -> Served:
    """Build the answerer of a server; one that takes token ids is first asked for one token.

    Raises UserError if the server fails, its context is too short, or `speculation` is wrong.
    """
    properties = server.describe()
    if server.kind.takes_ids:
        drafts = server.ask([0], 1)[0].speculation
        properties = server.describe()  # a router has loaded the model now
        properties["speculation"] = drafts or properties["speculation"]

    context = properties["context"]
    if context is not None and context < loaded.target.context:
        most = f"has a context of {context} tokens, and the model {loaded.target.context}"
        raise UserError(
            f"{server.where}: {most}; start it with a longer one, or say model.context={context}"
        )

    named = server.speculation
    reported = properties["speculation"]
    contradicts = (named == NO_SPECULATION) != (reported == NO_SPECULATION)
    if named and reported and contradicts:
        raise UserError(f"method.speculation={named}: {server.where} says {reported}")

    settings = method | properties | {"speculation": named or reported, "url": server.url}
    for decides_no_answer in ("timeout", "context", "dtype", "audit"):
        del settings[decides_no_answer]
    return Served(
        loaded,
        Drafter(loaded.target.device),
        settings,
        SERVED,
        server=server,
        properties=properties,
    )
