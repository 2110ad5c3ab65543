"""A connection to a server of any engine.

Each failure is an error of one line, and the run can be resumed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import httpx2

from model.errors import UserError, one_line

from ..records.provenance import without_passwords
from .engines import ENGINES, Reply, counted


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
        """Return the server's card of `model`, or of its only model.

        Raises UserError if it does not have the model.
        """
        listed = self.get("/v1/models") or {"data": ()}
        cards = {str(card["id"]): card for card in listed["data"]}
        name = self.model or (next(iter(cards)) if len(cards) == 1 else None)
        if name not in cards:
            names = ", ".join(cards) or "there is none at /v1/models"
            raise UserError(f"{self.where}: method.model={name}: name one of its models ({names})")
        return dict(cards[name])

    def describe(self) -> dict[str, Any]:
        """Return engine, model, version, speculation and context as the server reports them.

        Each is None if it does not.
        """
        with self._faults():
            said = self.kind.describe(self._card(), self.get)
            return {"engine": self.name, "model": self.model, **said}

    def get(self, path: str, body: Any = None) -> Any:
        """Return the JSON or text at a path, or of its reply to a body.

        None if the server has no such path.
        """
        with self._faults():
            response = self.client.request("POST" if body else "GET", path, json=body)
            # of counters, llama.cpp's router answers 400, and 501 without --metrics
            no_counters = "/metrics" in path and not response.is_success
            if no_counters or response.status_code in (404, 405, 501):
                return None
            self._refuse(response)
            is_json = "json" in response.headers.get("content-type", "")
            return response.json() if is_json else response.text

    def counters(self) -> dict[str, float]:
        """Return the counters of the whole server; empty if it has none."""
        with self._faults():
            path = self.kind.counters.format(quote(str(self.model), safe=""))
            return counted(self.get(path)) if path else {}

    def ask_again(self, prompt: list[int], limit: int) -> Reply:
        """Ask for an answer again without a stream, to get all ids.

        llama.cpp streams no ids inside a character.
        """
        with self._faults():
            body = self.kind.body(str(self.model), prompt, limit) | {"stream": False}
            again = Reply()
            self.kind.read(self.get(self.kind.path, body), again)
        return again

    def ask(self, prompt: list[int] | str, limit: int) -> tuple[Reply, list[float]]:
        """Return the server's answer to a prompt.

        Next to it are the seconds until each event with tokens or the end.
        """
        reply = Reply()
        times = []
        body = self.kind.body(str(self.model), prompt, limit)
        start = time.perf_counter()

        with self._faults(), self.client.sse(self.kind.path, method="POST", json=body) as source:
            self._refuse(source.response)
            for event in source:
                data = event.data.strip()
                if data == "[DONE]":
                    break
                # some errors have line breaks
                said = json.loads(data, strict=False) if data else None
                if not said:  # a frame that only keeps the connection
                    continue
                now = time.perf_counter()
                before = reply.progress
                if error := said.get("error"):
                    words = error.get("message") if isinstance(error, dict) else error
                    raise UserError(f"{self.where}: {one_line(str(words))[:300]}")
                self.kind.read(said, reply)
                if before != reply.progress:
                    times.append(now - start)
                    reply.first_tokens = reply.first_tokens or len(reply.ids) or 1

        return reply, times or [time.perf_counter() - start]  # nothing was sent

    def _refuse(self, response: httpx2.Response) -> None:
        """Raise UserError with the server's message if the status is no success."""
        if not response.is_success:  # a redirect, too
            said = one_line(response.read().decode(errors="replace"))[:300]
            raise UserError(
                f"{self.where}: answers {response.status_code} to {response.url.path}: {said}"
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
