"""A server that speaks as vLLM does and answers with a model's greedy tokens, faults on demand."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pandas as pd
from transformers import AutoModelForCausalLM

from tests.conftest import greedy
from tests.evaluation.conftest import answers_in

ONE = ("bench.categories=[qa]", "method.speculation=none", "timed=false")
TEXT = "text/plain"
NOTHING = ("no such path", 404, TEXT)


def served_rows(tmp_path, name="served"):
    """The overall rows of a run of method=server, by method."""
    table = pd.read_csv(tmp_path / f"results/{name}/tables/main.csv")
    return table[table["category"] == "overall"].set_index("method")


def choices_in(tmp_path, name="served"):
    """The choices of the only run's answers."""
    rows = answers_in(tmp_path / "results" / name)
    return [choice for row in rows for choice in row["choices"]]


class FakeEngine:
    """An engine at `url`; with `drafting`, each step but the first accepts one draft token."""

    def __init__(self, folder, *, drafting=False):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.drafting = drafting
        self.accepted = 0
        self.lock = threading.Lock()
        self.restarted = threading.Event()
        self.reset()
        handler = type("Handler", (Handler,), {"engine": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reset(self):
        """As a server that has just been started, but for the number of accepted tokens."""
        self.restarted.set()
        self.restarted = threading.Event()
        self.owner = "vllm"
        self.name = "toy"
        self.context = 512
        self.key = ""  # to be given
        self.pages = {}  # by path: what is answered in place of its own, status and content type
        self.changed = {}  # tokens by their place in an answer
        self.frames = None  # of a request's body: a stream in place of the model's tokens
        self.fault = None  # of a stream: what is sent in its place
        self.asked = 0  # requests of more than a token
        self.now = 0
        self.most = 0  # requests at the same time

    def page(self, path):
        own = {
            "/v1/models": ({"data": [self.card()]},),
            "/version": ({"version": "0"},),
            "/metrics": (self.counters(), 200, TEXT),
        }
        return self.pages.get(path) or own.get(path, NOTHING)

    def card(self):
        return {"id": self.name, "owned_by": self.owner, "max_model_len": self.context}

    def counters(self):
        lines = "vllm:requests_total 0\n"
        for name in ("num_accepted_tokens", "num_drafts") if self.drafting else ():
            lines += f"vllm:spec_decode_{name}_total {self.accepted}\n"
        return lines

    def answer(self, body):
        """A stream: its events, bytes as they are, and functions to call in between."""
        limit = body["max_tokens"]
        if self.frames and limit > 1:
            stream = self.frames(body)
        else:
            with self.lock:
                ids = greedy(self.model, body["prompt"], limit, [2])
            ids = [self.changed.get(i, token) for i, token in enumerate(ids)]
            stream = self.vllm_events(body, ids)
        return self.fault(stream) if self.fault and limit > 1 else stream

    def vllm_events(self, body, ids):
        events = []
        begin = 0
        while begin < len(ids):
            end = begin + (2 if self.drafting and begin else 1)
            events.append(chunk(token_ids=ids[begin:end]))
            begin = end
        events[-1]["choices"][0]["finish_reason"] = "stop" if ids[-1] == 2 else "length"
        if self.drafting:  # one may be behind the end
            self.accepted += len(events) - 1
        return [*events, usage(len(ids), len(body["prompt"]))]


def chunk(text="", finish_reason=None, **more):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason} | more]}


def usage(tokens, prompt_tokens=None):
    said = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    return {"choices": [], "usage": said}


class Handler(BaseHTTPRequestHandler):
    engine: FakeEngine

    def log_message(self, *_):
        pass

    def reply(self, what, code=200, kind="application/json"):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(what.encode() if isinstance(what, str) else json.dumps(what).encode())

    def do_GET(self):
        given = self.headers["Authorization"]
        if self.engine.key and given != f"Bearer {self.engine.key}":
            self.reply(f"{given} is not {self.engine.key}", 401, TEXT)
        else:
            self.reply(*self.engine.page(self.path))

    def do_POST(self):
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in engine.pages or self.path != "/v1/completions":
            self.reply(*engine.page(self.path))
            return
        with engine.lock:
            engine.asked += body["max_tokens"] > 1
            engine.now += 1
            engine.most = max(engine.most, engine.now)
        try:
            self.speak(body)
        except BrokenPipeError:  # the client waits no longer
            pass
        finally:
            engine.now -= 1

    def speak(self, body):
        stream = self.engine.answer(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for part in stream:
            if callable(part):
                part()
            else:
                event = (
                    part if isinstance(part, bytes) else f"data: {json.dumps(part)}\n\n".encode()
                )
                self.wfile.write(event)
                self.wfile.flush()
