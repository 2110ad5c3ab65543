"""Serving engines: how each is asked for an answer, and what it says of the answer, its counters and itself.

A step is counted as here: the forward that gives the first token is one, and so is each forward after it. Most engines
count only what they drafted, so that the steps are what is left of the tokens: (tokens - 1) - accepted drafts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

Get = Callable[[str], Any]  # returns what a path of the server holds, None if it has none


@dataclass
class Heard:
    """What a stream has said of its answer so far. None: the engine has not said it."""

    ids: list[int] = field(default_factory=list)
    first_tokens: int = 0  # of the first event that brought some; 1 where it brought text alone
    text: str = ""
    finish: str = ""  # stop, length, or another word of the engine's
    tokens: int | None = None  # the engine's own count
    prompt_tokens: int | None = None
    accepted: int | None = None  # draft tokens, perhaps some behind the answer's end
    drafts: int = 0  # steps that had a draft
    later_steps: int | None = None  # behind the first, where the engine counts them
    speculation: str | None = None
    own: dict[str, tuple[float, float]] = field(default_factory=dict)  # the engine's own mean, as a sum over a count

    @property
    def steps(self) -> int | None:
        """The steps of the answer; None if the engine does not say.

        Where accepted tokens behind the answer's end are counted, steps without a draft may be too few by these.
        """
        if self.later_steps is None and (self.accepted is None or self.tokens is None):
            return None
        known = self.later_steps
        return 1 + (max((self.tokens or 1) - 1 - (self.accepted or 0), self.drafts) if known is None else known)

    def drafted(self, name: str, accepted: float, drafts: float) -> None:
        """Note accepted draft tokens, in how many steps with a draft; and the engine's mean over these steps."""
        self.accepted, self.drafts = int(accepted), int(drafts)
        if drafts:
            self.own[name] = (drafts + accepted, drafts)


class Engine:
    """Any engine with OpenAI's /v1/completions: it counts no steps, and may take a prompt's text alone."""

    path: ClassVar[str] = "/v1/completions"
    counters: ClassVar[str | None] = None  # where they are, in Prometheus' text format
    takes_ids: ClassVar[bool] = False

    def body(self, model: str, prompt: list[int] | str, limit: int) -> dict[str, Any]:
        """Return the request for a greedy streamed answer."""
        usage = {"stream_options": {"include_usage": True}}
        return {"model": model, "prompt": prompt, "max_tokens": limit, "temperature": 0.0, "stream": True} | usage

    def read(self, event: dict[str, Any], heard: Heard) -> bool:
        """Add an event of the stream; return True if it brought tokens."""
        before = len(heard.ids), len(heard.text)
        for choice in event.get("choices") or ():
            heard.ids += choice.get("token_ids") or ()
            heard.text += choice.get("text") or ""
            heard.finish = choice.get("finish_reason") or heard.finish
        if usage := event.get("usage"):
            heard.tokens, heard.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        if said := (event.get("metrics") or {}).get("speculative_decoding"):  # vLLM's
            heard.drafted("mean_acceptance_length", said["num_accepted_draft_tokens"], said["num_spec_steps"])
        return before != (len(heard.ids), len(heard.text))

    def count(self, moved: dict[str, float], heard: Heard) -> None:
        """Add by how much the server's counters rose during the answer, the only one at that time."""

    def describe(self, card: dict[str, Any], get: Get) -> dict[str, Any]:
        """Return version, speculation (`none` if there is none) and context, as far as the server says them.

        Args:
            card: of the model in /v1/models.
        """
        return {"version": None, "speculation": None, "context": card.get("max_model_len")}


class Vllm(Engine):
    """vLLM. Started with --per-request-spec-decode-metrics it counts drafts by answer, else for the whole server."""

    counters, takes_ids = "/metrics", True

    def body(self, model: str, prompt: list[int] | str, limit: int) -> dict[str, Any]:
        return super().body(model, prompt, limit) | {"return_token_ids": True}

    def count(self, moved: dict[str, float], heard: Heard) -> None:
        if heard.accepted is None and moved:
            names = (f"vllm:spec_decode_num_{what}_total" for what in ("accepted_tokens", "drafts"))
            heard.drafted("mean_acceptance_length", *(moved.get(name, 0.0) for name in names))

    def describe(self, card: dict[str, Any], get: Get) -> dict[str, Any]:
        counters, version = get("/metrics"), get("/version") or {}
        speculates = counters and "vllm:spec_decode_num_drafts" in counters  # there are none without speculation
        said = {"speculation": ("speculative" if speculates else "none") if counters else None}
        return super().describe(card, get) | {"version": version.get("version")} | said


class Sglang(Engine):
    """SGLang, by its own /generate: it verifies a draft in every step but the first, and counts these by answer."""

    path, takes_ids = "/generate", True

    def body(self, model: str, prompt: list[int] | str, limit: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": limit, "temperature": 0.0}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": True}

    def read(self, event: dict[str, Any], heard: Heard) -> bool:
        said, known = event["meta_info"], len(heard.ids)
        ids = event.get("output_ids") or []
        heard.tokens, heard.prompt_tokens = said["completion_tokens"], said["prompt_tokens"]
        if (new := heard.tokens - known) > 0:  # events hold all ids so far, or the last ones if the server says so
            heard.ids += ids[-new:]
        heard.text = event.get("text") or heard.text
        if finish := said.get("finish_reason"):
            heard.finish, heard.later_steps = finish["type"], said.get("spec_verify_ct")
            if (verified := said.get("spec_verify_ct")) and said.get("spec_accept_length"):
                heard.own["spec_accept_length"] = (said["spec_accept_length"] * verified, verified)
        return len(heard.ids) > known

    def describe(self, card: dict[str, Any], get: Get) -> dict[str, Any]:
        info = get("/server_info") or get("/get_server_info") or {}
        said = {"speculation": (info["speculative_algorithm"] or "none") if "speculative_algorithm" in info else None}
        context = info.get("context_length") or card.get("max_model_len")
        return {"version": info.get("version"), "context": context} | said


class LlamaCpp(Engine):
    """llama.cpp's server, by its own /completion. What a request of one token says of speculation is believed."""

    path, counters, takes_ids = "/completion", "/metrics", True

    def body(self, model: str, prompt: list[int] | str, limit: int) -> dict[str, Any]:
        plain = {"prompt": prompt, "n_predict": limit, "temperature": 0.0, "stream": True}
        return plain | {"model": model, "return_tokens": True, "cache_prompt": False}

    def read(self, event: dict[str, Any], heard: Heard) -> bool:
        heard.ids += event.get("tokens") or ()
        heard.text += event.get("content") or ""
        if event.get("stop"):
            heard.finish = {"eos": "stop", "limit": "length"}.get(event["stop_type"], event["stop_type"])
            heard.tokens, heard.prompt_tokens = event["tokens_predicted"], event["tokens_evaluated"]
            heard.accepted = event["timings"].get("draft_n_accepted", 0)  # only there if something was drafted
            types = str(event["generation_settings"].get("speculative.types", "none")).split(",")
            heard.speculation = ",".join(name for name in types if name != "none") or "none"
        return bool(event.get("tokens"))

    def count(self, moved: dict[str, float], heard: Heard) -> None:
        if drafts := moved.get("llamacpp:spec_decode_num_drafts_total"):
            heard.drafted("mean_len", heard.accepted or 0, drafts)

    def describe(self, card: dict[str, Any], get: Get) -> dict[str, Any]:
        props = get("/props") or {}
        context = (props.get("default_generation_settings") or {}).get("n_ctx")
        return {"version": props.get("build_info"), "speculation": None, "context": context}


class TensorRt(Engine):
    """TensorRT-LLM's trtllm-serve; it gives ids in place of text, and counts drafts for the whole server."""

    counters, takes_ids = "/prometheus/metrics", True

    def body(self, model: str, prompt: list[int] | str, limit: int) -> dict[str, Any]:
        return super().body(model, prompt, limit) | {"detokenize": False}

    def read(self, event: dict[str, Any], heard: Heard) -> bool:
        brought, tokens = super().read(event, heard), len(heard.ids)
        for mean in (choice.get("avg_decoded_tokens_per_iter") for choice in event.get("choices") or ()):
            heard.own |= {"avg_decoded_tokens_per_iter": (tokens, tokens / mean)} if mean else {}
        return brought

    def count(self, moved: dict[str, float], heard: Heard) -> None:
        if moved:
            heard.accepted = int(moved.get("trtllm_spec_decode_num_accepted_tokens_total", 0.0))

    def describe(self, card: dict[str, Any], get: Get) -> dict[str, Any]:
        counters, version = get(self.counters), get("/version") or {}
        speculates = counters and "trtllm_spec_decode" in counters
        said = {"speculation": ("speculative" if speculates else "none") if counters else None}
        return super().describe(card, get) | {"version": version.get("version")} | said


OTHER = "other"
ENGINES = {"vllm": Vllm(), "sglang": Sglang(), "llamacpp": LlamaCpp(), "tensorrt": TensorRt(), OTHER: Engine()}
OWNERS = {"tensorrt_llm": "tensorrt"}  # of models in /v1/models, where it is not the engine's name here


def counted(text: str | None) -> dict[str, float]:
    """Return the counters of a text in Prometheus' format, each summed over its labels."""
    sums: Counter[str] = Counter()
    for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)", text or "", re.M):
        sums[name] += float(value)  # type: ignore[assignment]
    return dict(sums)
