"""A connection to a server of any engine. Whatever goes wrong there is an error of one line, and the run resumes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
from httpx_sse import SSEError, connect_sse

from model.errors import UserError, one_line

from .engines import ENGINES, OTHER, OWNERS, Heard, counted


class Server:
    """A server, its engine, and the model that it is asked for. The arguments are the settings of method=server.

    Args:
        url: as http://127.0.0.1:8000, with or without OpenAI's /v1.
        model: its name there; None: the only one that the server has.
        engine: auto: as the server's list of models says.
        speculation: how it speculates, for its name; none: not at all, its engine's baseline; None: as it says.
        dtype: the type that it computes in, for the audit; None: the local model's.
        timeout: the most seconds without a byte of an answer.

    Raises:
        UserError: it is not in reach, or does not have the model.
    """

    def __init__(
        self,
        url: str | None,
        model: str | None = None,
        engine: Literal["auto", "vllm", "sglang", "llamacpp", "tensorrt", "other"] = "auto",
        speculation: str | None = None,
        dtype: Literal["float32", "float16", "bfloat16"] | None = None,
        timeout: float = 600.0,
    ) -> None:
        if url is None:
            raise UserError("method.url: has to be given: a server's address, as http://127.0.0.1:8000")
        self.where, self.speculation, self.dtype, self.timeout = f"server {url}", speculation, dtype, timeout
        fresh = httpx.Limits(max_keepalive_connections=0)  # servers close idle connections when they like
        self.name: str = engine
        self.client = httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), timeout=timeout, limits=fresh)
        card = self._card(model)
        owner = str(card.get("owned_by"))
        found = OWNERS.get(owner, owner) if engine == "auto" else engine
        self.name, self.model = found if found in ENGINES else OTHER, str(card["id"])
        self.engine = ENGINES[self.name]

    def _card(self, model: str | None) -> dict[str, Any]:
        """Return what the server says of this model, or of its only one. Raises UserError if it does not have it."""
        listed = self.get("/v1/models")
        if not isinstance(listed, dict) or not isinstance(listed.get("data"), list):
            raise UserError(f"{self.where}: has no list of models at /v1/models; is it an engine's?")
        cards = {str(card["id"]): card for card in listed["data"]}
        name = next(iter(cards)) if model is None and len(cards) == 1 else model
        if name is None or name not in cards:
            raise UserError(f"{self.where}: method.model={name}: name one of its models ({', '.join(cards) or 'none'})")
        return dict(cards[name])

    def describe(self) -> dict[str, Any]:
        """Return engine, model, version, speculation and context as the server says them; None where it does not."""
        return {"engine": self.name, "model": self.model} | self.engine.describe(self._card(self.model), self.get)

    def get(self, path: str) -> Any:
        """Return the JSON or text at a path; None if the server has no such path."""
        with self._faults():
            response = self.client.get(path)
            if response.is_client_error or response.status_code == 501:  # llama.cpp's, without --metrics
                return None
            self._refuse(response)
            return response.json() if "json" in response.headers.get("content-type", "") else response.text

    def counters(self) -> dict[str, float]:
        """Return the counters of the whole server; empty if it has none."""
        return counted(self.get(self.engine.counters)) if self.engine.counters else {}

    def ask(self, prompt: list[int] | str, limit: int) -> tuple[Heard, list[float]]:
        """Return what the server says to a prompt, and the seconds until each event that brought tokens.

        Raises:
            UserError: an error of the server's, a stream that hangs or breaks off, or is not the engine's.
        """
        heard, times, body, start = Heard(), [], self.engine.body(self.model, prompt, limit), time.perf_counter()
        with self._faults(), connect_sse(self.client, "POST", self.engine.path, json=body) as source:
            self._refuse(source.response)
            for event in source.iter_sse():
                if event.data == "[DONE]":
                    break
                now, before = time.perf_counter(), (len(heard.ids), len(heard.text))
                said = json.loads(event.data, strict=False)  # some errors have line breaks
                if error := said.get("error"):
                    words = error.get("message") if isinstance(error, dict) else error
                    raise UserError(f"{self.where}: {one_line(ValueError(words))[:300]}")
                self.engine.read(said, heard)
                if before != (len(heard.ids), len(heard.text)):
                    times.append(now - start)
                    heard.first_tokens = heard.first_tokens or len(heard.ids) or 1
        if heard.finish not in ("stop", "length"):
            why = f"the engine says {heard.finish}" if heard.finish else "the stream broke off"
            raise UserError(f"{self.where}: an answer has no end: {why}")
        return heard, times or [now - start]  # a text of no character: the end alone

    def _refuse(self, response: httpx.Response) -> None:
        """Raise UserError for a status of an error, with what the server says to it."""
        if response.is_error:
            said = one_line(ValueError(response.read().decode(errors="replace")))[:300]
            raise UserError(f"{self.where}: answers {response.status_code} to {response.url.path}: {said}")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise what goes wrong on the way as a UserError."""
        try:
            yield
        except UserError:
            raise
        except httpx.TimeoutException:
            raise UserError(f"{self.where}: silent for {self.timeout:g} s (method.timeout)") from None
        except httpx.ConnectError as error:
            raise UserError(f"{self.where}: not in reach ({one_line(error)}); is method.url right?") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(f"{self.where}: the connection broke ({one_line(error)[:200]})") from None
        except (SSEError, ValueError, KeyError, TypeError, AttributeError) as error:
            sent = f"sends what {self.name} does not ({type(error).__name__}: {one_line(error)[:200]})"
            raise UserError(f"{self.where}: {sent}; is method.engine right?") from None
