"""Servers of any engine: how each is asked, and how answers, counters and properties are read.

Steps are counted as on this engine, the first token's step included. For most engines, their number
is that of the tokens that were not accepted drafts.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import httpx2

from model.errors import UserError, one_line, whole_characters

from ..records.provenance import without_passwords
from ..records.runs import NO_SPECULATION


@dataclass
class Reply:
    """What a stream has reported about its answer so far; None: not reported."""

    ids: list[int] = field(default_factory=list)
    first_tokens: int = 0  # tokens of the first event that had some; 1 if it had only text
    text: str = ""
    finish: str = ""  # stop, length, or another word of the engine's
    stopped_by: Any = None  # the token or text that ended the answer, if it may be no EOS
    tokens: int = 0  # the engine's own count
    prompt_tokens: int | None = None
    accepted: int | None = None  # accepted draft tokens, perhaps some after the answer's end
    drafts: int = 0  # steps that had a draft
    forwards: int = 0  # forwards that gave tokens, if the engine counts them
    speculation: str | None = None
    # the engine's own mean: a sum and its count
    means: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[int, int, str]:
        """What changes with an event that holds some of the answer, or its end."""
        return len(self.ids), len(self.text), self.finish

    @property
    def steps(self) -> int | None:
        """The number of the answer's steps; `accepted` may count tokens after the end."""
        # `forwards` may include forwards for other answers
        steps = max(self.tokens - (self.accepted or 0), 1 + self.drafts, self.forwards)
        return None if self.accepted is None else min(self.tokens, steps)


def at(value: Any, path: str) -> Any:
    """Return what is at a path of keys, of a list in its first item; None if nothing is."""
    for key in path.split("/"):
        first = value[0] if isinstance(value, list) and value else value
        value = first.get(key) if first else None
    return value


OPENAI = {
    "ids": "choices/token_ids",
    "text": "choices/text",
    "finish": "choices/finish_reason",
    "stopped_by": "choices/stop_reason",
    "tokens": "usage/completion_tokens",
    "prompt_tokens": "usage/prompt_tokens",
    # vLLM's, if set to report it
    "accepted": "metrics/speculative_decoding/num_accepted_draft_tokens",
    "drafts": "metrics/speculative_decoding/num_spec_steps",
}
SGLANG = {
    "ids": "output_ids",
    "text": "text",
    "finish": "meta_info/finish_reason/type",
    "stopped_by": "meta_info/finish_reason/matched",
    "tokens": "meta_info/completion_tokens",
    "prompt_tokens": "meta_info/prompt_tokens",
}
LLAMACPP = {
    "ids": "tokens",
    "text": "content",
    "finish": "stop_type",
    "tokens": "tokens_predicted",
    "prompt_tokens": "tokens_evaluated",
    "accepted": "timings/draft_n_accepted",
    "speculation": "generation_settings/speculative.types",
}


@dataclass(frozen=True)
class Engine:
    """An engine with OpenAI's /v1/completions; by default it takes texts and counts no drafts."""

    fields: dict[str, str]  # of a reply: their paths in an event
    takes_ids: bool = False
    also: dict[str, float] = field(default_factory=dict)  # request fields beyond OpenAI's interface
    # path of the whole server's counters, in Prometheus' text format; {}: the model's name
    counters: str = ""
    prefix: str = ""  # of the engine's own counters, which may be switched off
    mean: str = ""  # its name for 1 + accepted draft tokens / steps with a draft
    path: str = "/v1/completions"

    def body(self, model: str, prompt: list[int] | str, limit: int) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": limit,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.also,
        }

    def read(self, event: dict[str, Any], reply: Reply) -> None:
        values = {name: at(event, path) for name, path in self.fields.items()}
        reply.ids += values.pop("ids") or ()
        reply.text += values.pop("text") or ""
        for name, value in values.items():
            if value is not None:
                setattr(reply, name, value)

        if mean := at(event, "choices/avg_decoded_tokens_per_iter"):  # TensorRT-LLM's
            reply.means["avg_decoded_tokens_per_iter"] = (len(reply.ids), len(reply.ids) / mean)

    def count(self, moved: dict[str, float], reply: Reply) -> None:
        """Add the increase of the server's counters, empty for concurrent requests."""
        accepted = moved.get(f"{self.prefix}spec_decode_num_accepted_tokens_total", 0)
        drafts = moved.get(f"{self.prefix}spec_decode_num_drafts_total", 0)
        # entries of a histogram
        reply.forwards = int(moved.get("vllm:iteration_tokens_total_count", 0))
        if any(name.startswith(self.prefix) for name in moved) and not reply.drafts:
            reply.accepted = int(accepted) if reply.accepted is None else reply.accepted
            reply.drafts = int(drafts)
        if reply.drafts and self.mean:
            reply.means[self.mean] = (reply.drafts + (reply.accepted or 0), reply.drafts)

    def describe(self, card: dict[str, Any], get: Callable[[str], Any]) -> dict[str, Any]:
        counters = (get(self.counters) or "") if self.counters else ""
        version = get("/version")
        drafts = "speculative" if f"{self.prefix}spec_decode_" in counters else NO_SPECULATION
        speculation = drafts if self.prefix and self.prefix in counters else None
        return {
            "version": version.get("version") if isinstance(version, dict) else None,
            "speculation": speculation,
            "context": card.get("max_model_len"),
        }


class Sglang(Engine):
    """SGLang, by its own /generate.

    It verifies a draft in every step but the first and reports their number.
    """

    def body(self, model: str, prompt: list[int] | str, limit: int) -> dict[str, Any]:
        return {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": limit, "temperature": 0.0},
            "stream": True,
        }

    def read(self, event: dict[str, Any], reply: Reply) -> None:
        # an event has all of the text, and all ids so far or, if so set, the last
        text = event.get("text") or reply.text
        new = event["meta_info"]["completion_tokens"] - len(reply.ids)
        last = event["output_ids"][-new:] if new > 0 else []
        super().read(event | {"output_ids": last}, reply)
        reply.text = text

        steps = at(event, "meta_info/spec_verify_ct")
        mean = at(event, "meta_info/spec_accept_length")
        if steps is not None:  # SGLang's own count of accepted tokens has had several names
            reply.accepted = reply.tokens - 1 - steps if steps else 0
        if steps and mean:
            reply.means["spec_accept_length"] = (mean * steps, steps)

    def describe(self, card: dict[str, Any], get: Callable[[str], Any]) -> dict[str, Any]:
        info = get("/server_info") or get("/get_server_info") or {}
        speculation = info.get("speculative_algorithm") or (NO_SPECULATION if info else None)
        return {
            "version": info.get("version"),
            "speculation": speculation,
            "context": info.get("context_length"),
        }


class LlamaCpp(Engine):
    """llama.cpp's server, by its own /completion; an answer's last event tells its speculation."""

    def body(self, model: str, prompt: list[int] | str, limit: int) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "n_predict": limit,
            "temperature": 0.0,
            "stream": True,
            "model": model,
            "return_tokens": True,
            "cache_prompt": False,
        }

    def read(self, event: dict[str, Any], reply: Reply) -> None:
        super().read(event, reply)
        if event.get("stop"):
            reply.finish = {"eos": "stop", "limit": "length"}.get(reply.finish, reply.finish)
            if reply.ids and len(reply.ids) == reply.tokens:
                reply.stopped_by = reply.ids[-1]
            reply.accepted = reply.accepted or 0  # missing if nothing was drafted
            types = (reply.speculation or NO_SPECULATION).split(",")
            drafting = [name for name in types if name != NO_SPECULATION]
            reply.speculation = ",".join(drafting) or NO_SPECULATION

    def describe(self, card: dict[str, Any], get: Callable[[str], Any]) -> dict[str, Any]:
        props = get("/props") or {}
        context = at(card, "meta/n_ctx")
        return {"version": props.get("build_info"), "speculation": None, "context": context}


_VLLM = {
    "return_token_ids": True,
    # else the checkpoint's penalties apply
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
ENGINES = {
    "vllm": Engine(OPENAI, True, _VLLM, "/metrics", "vllm:", "mean_acceptance_length"),
    "sglang": Sglang(SGLANG, True, path="/generate"),
    "llamacpp": LlamaCpp(
        LLAMACPP, True, {}, "/metrics?model={}", "llamacpp:", "mean_len", "/completion"
    ),
    "tensorrt": Engine(OPENAI, True, {"detokenize": False}, "/prometheus/metrics", "trtllm_"),
    "other": Engine(OPENAI),
}


def counted(text: str | None) -> dict[str, float]:
    """Return the counters of a text in Prometheus' format, each summed over its labels."""
    sums: Counter[str] = Counter()
    for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)", text or "", re.M):
        sums[name] += float(value)  # type: ignore[assignment]
    return dict(sums)


@dataclass
class Server:
    """A server; the settings of method=server.

    Raises UserError if it is not in reach, or does not have the model.
    """

    url: str | None  # as http://127.0.0.1:8000, with or without OpenAI's /v1
    model: str | None = None  # its name on the server; None: the server's only model
    # auto: as the server reports
    engine: Literal["auto", "vllm", "sglang", "llamacpp", "tensorrt", "other"] = "auto"
    # how it drafts, for its name; none: the baseline; None: as the server reports
    speculation: str | None = None
    # the server's, for audits; None: the local model's
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    timeout: float = 600.0  # maximum seconds without a byte
    audit: bool = True  # False: the local model's weights are not loaded

    def __post_init__(self) -> None:
        if self.url is None:
            raise UserError(
                "method.url: has to be given: a server's address, as http://127.0.0.1:8000"
            )
        if not self.timeout > 0:
            raise UserError(f"method.timeout={self.timeout}: must be more than 0 seconds")

        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            raise UserError("OPENAI_API_KEY: holds characters that no header can have; correct it")
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        base = self.url.rstrip("/").removesuffix("/v1")
        self.url = without_passwords(base)
        self.where = f"server {self.url}"
        # servers close idle connections when they like
        fresh = httpx2.Limits(max_keepalive_connections=0)

        with self._faults():  # trust_env=False: a proxy would be asked for 127.0.0.1, too
            self.client = httpx2.Client(
                base_url=base, headers=headers, timeout=self.timeout, limits=fresh, trust_env=False
            )
            card = self._card()

        owner = str(card.get("owned_by")).removesuffix("_llm")  # TensorRT-LLM's
        reported = owner if owner in ENGINES else "other"
        self.name = reported if self.engine == "auto" else self.engine
        self.kind = ENGINES[self.name]
        self.model = str(card["id"])

    def _card(self) -> dict[str, Any]:
        listed = self.get("/v1/models") or {"data": ()}
        cards = {str(card["id"]): card for card in listed["data"]}
        name = self.model or (next(iter(cards)) if len(cards) == 1 else None)
        if name not in cards:
            names = ", ".join(cards) or "there is none at /v1/models"
            raise UserError(f"{self.where}: method.model={name}: name one of its models ({names})")
        return dict(cards[name])

    def describe(self) -> dict[str, Any]:
        with self._faults():
            properties = self.kind.describe(self._card(), self.get)
            return {"engine": self.name, "model": self.model, **properties}

    def get(self, path: str) -> Any:
        """Return the JSON or text at a path; None if it is missing."""
        with self._faults():
            response = self.client.get(path)
            # of counters, llama.cpp's router answers 400, and 501 without --metrics
            no_counters = "/metrics" in path and not response.is_success
            if no_counters or response.status_code in (404, 405, 501):
                return None
            self._refuse(response)
            is_json = "json" in response.headers.get("content-type", "")
            return response.json() if is_json else response.text

    def counters(self) -> dict[str, float]:
        with self._faults():
            path = self.kind.counters.format(quote(str(self.model), safe=""))
            return counted(self.get(path)) if path else {}

    def ask(self, prompt: list[int] | str, limit: int) -> tuple[Reply, list[float]]:
        """Return the answer to a prompt, and the seconds until each event of it."""
        reply = Reply()
        times = []
        body = self.kind.body(str(self.model), prompt, limit)
        start = time.perf_counter()

        with self._faults(), self.client.sse(self.kind.path, method="POST", json=body) as source:
            self._refuse(source.response)
            for frame in source:
                data = frame.data.strip()
                if data == "[DONE]":
                    break
                # some errors have line breaks
                event = json.loads(data, strict=False) if data else None
                if not event:  # a frame that only keeps the connection
                    continue
                now = time.perf_counter()
                before = reply.progress
                if error := event.get("error"):
                    words = error.get("message") if isinstance(error, dict) else error
                    raise UserError(f"{self.where}: {one_line(str(words))[:300]}")
                self.kind.read(event, reply)
                if before != reply.progress:
                    times.append(now - start)
                    reply.first_tokens = reply.first_tokens or len(reply.ids) or 1

        text = whole_characters(reply.text)  # events may cut a character in two
        lost = text.count("\ufffd") - reply.text.count("\ufffd")
        if lost:
            print(f"{self.where}: {lost} half characters became U+FFFD", file=sys.stderr)
        reply.text = text
        return reply, times or [time.perf_counter() - start]  # nothing was sent

    def _refuse(self, response: httpx2.Response) -> None:
        if not response.is_success:  # a redirect, too
            message = one_line(response.read().decode(errors="replace"))[:300]
            raise UserError(
                f"{self.where}: answers {response.status_code} to {response.url.path}: {message}"
            )

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise errors of the connection, and of what the server sends, as a UserError."""
        try:
            yield
        except UserError as error:  # a server may repeat the key
            raise UserError(str(error).replace(self.key or "\n", "...")) from None
        except httpx2.TimeoutException:
            raise UserError(
                f"{self.where}: silent for {self.timeout:g} s (method.timeout)"
            ) from None
        except httpx2.HTTPError as error:
            raise UserError(
                f"{self.where}: not in reach, or the connection broke ({one_line(error)[:200]})"
            ) from None
        except (httpx2.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
            sent = f"{type(error).__name__}: {one_line(error)[:200]}"
            raise UserError(
                f"{self.where}: not what {self.engine} sends ({sent}); are url and engine right?"
            ) from None
