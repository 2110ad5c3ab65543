"""A server that speaks as vLLM or llama.cpp does and answers with a model's greedy tokens, faults on demand."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pandas as pd
from transformers import AutoModelForCausalLM

from tests.conftest import greedy

ONE = ("bench.categories=[qa]", "method.speculation=none", "timed=false")


def served_rows(tmp_path, name="served"):
    """The overall rows of a run of method=server, by method."""
    table = pd.read_csv(tmp_path / f"results/{name}/tables/main.csv")
    return table[table["category"] == "overall"].set_index("method")


class FakeEngine:
    """`drafting`: each step but the first accepts one draft token; its answers' i-th tokens may be `changed`.

    `pages`: what it answers to a GET of a path, status and content type, in place of its own. `frames`: of a request's
    body, the seconds before each part of a stream and its bytes, in place of the model's tokens. `key`: to be given.
    """

    def __init__(self, folder, *, drafting=False, owner="vllm"):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.drafting, self.owner, self.name, self.context = drafting, owner, "toy", 512
        self.steps = self.accepted = self.drafts = self.asked = self.now = self.most = 0
        self.fault, self.changed, self.delay, self.lock = None, {}, 0.0, threading.Lock()
        self.pages, self.frames, self.key = {}, None, ""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(self, what, code=200, kind="application/json"):
                data = what.encode() if isinstance(what, str) else json.dumps(what).encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                given = self.headers["Authorization"]
                if engine.key and given != f"Bearer {engine.key}":
                    self.answer(f"{given} is not {engine.key}", 401, "text/plain")
                elif self.path in engine.pages:
                    self.answer(*engine.pages[self.path])
                elif self.path == "/v1/models":
                    card = {
                        "id": engine.name,
                        "owned_by": engine.owner,
                        "max_model_len": engine.context,
                    }
                    self.answer({"data": [card]})
                elif self.path == "/version":
                    self.answer({"version": "0"})
                elif self.path == "/metrics":
                    names = {"num_accepted_tokens": engine.accepted, "num_drafts": engine.drafts}
                    spec = (f"vllm:spec_decode_{name}_total {n}\n" for name, n in names.items())
                    self.answer(
                        "vllm:requests_total 0\n" + "".join(spec if engine.drafting else ()),
                        kind="text/plain",
                    )
                else:
                    self.answer("no such path", 404, "text/plain")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != (
                    "/completion" if engine.owner == "llamacpp" else "/v1/completions"
                ):
                    return self.answer("no such path", 404, "text/plain")
                if engine.owner == "llamacpp":
                    body["max_tokens"] = body["n_predict"]
                with engine.lock:
                    engine.asked += body["max_tokens"] > 1
                    engine.now += 1
                    engine.most = max(engine.most, engine.now)
                try:
                    engine.stream(self, body)
                except BrokenPipeError:  # the client waits no longer
                    pass
                finally:
                    engine.now -= 1
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stream(self, handler, body):
        fault = self.fault if body["max_tokens"] > 1 else None
        if fault == "refuses":
            return handler.answer({"error": {"message": "The model does not exist."}}, 404)
        if fault == "500":
            return handler.answer("out of\nmemory", 500, "text/plain")
        if self.frames and body["max_tokens"] > 1:
            handler.send_response(200)
            handler.send_header("Content-Type", "text/event-stream")
            handler.end_headers()
            for seconds, frame in self.frames(body):
                time.sleep(seconds)
                handler.wfile.write(frame)
                handler.wfile.flush()
            return None
        time.sleep(self.delay)
        with self.lock:
            ids = greedy(self.model, body["prompt"], body["max_tokens"], [2])
        ids = [self.changed.get(i, token) for i, token in enumerate(ids)]
        if self.owner == "llamacpp" and not body["stream"]:
            return handler.answer(llama_events(body["prompt"], ids, ids)[-1])
        ids = ids[:4] if fault in ("hides", "stop word") else ids
        size = 2 if self.drafting else 1
        chunks = [ids[:1]] + [ids[i : i + size] for i in range(1, len(ids), size)]
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()

        def send(event):
            handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            handler.wfile.flush()

        if self.owner == "llamacpp":
            for event in llama_events(body["prompt"], ids, []):
                send(event)
            return None
        for i, chunk in enumerate(chunks):
            if i == 2 and fault == "drops":
                continue
            if i == 2 and fault == "hangs":
                time.sleep(2)
            if i == 2 and fault == "breaks":
                return None
            if i == 2 and fault == "error":
                return send({"error": {"message": "CUDA\nerror"}})
            ended = i == len(chunks) - 1
            finish = (
                ("stop" if ids[-1] == 2 or fault in ("hides", "stop word") else "length")
                if ended
                else None
            )
            choice = {"index": 0, "text": "", "token_ids": chunk, "finish_reason": finish}
            send({"choices": [choice | ({"stop_reason": "###"} if fault == "stop word" else {})]})
        # one may be behind the end
        accepted, drafts = (len(chunks) - 1, len(chunks) - 1) if self.drafting else (0, 0)
        self.accepted, self.drafts = self.accepted + accepted, self.drafts + drafts
        count = str(len(ids)) if fault == "words" else len(ids)
        send(
            {
                "choices": [],
                "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": count},
            }
        )
        handler.wfile.write(b"data: [DONE]\n\n")
        return None


def llama_events(prompt, ids, last):
    """llama.cpp's events: inside a character (here each third token) it sends none, and of a stream `last` is empty."""
    stop = {
        "stop": True,
        "stop_type": "eos" if ids[-1] == 2 else "limit",
        "timings": {},
        "generation_settings": {},
    }
    stop |= {
        "content": "",
        "tokens": last,
        "tokens_predicted": len(ids),
        "tokens_evaluated": len(prompt),
    }
    return [{"content": "", "tokens": [token]} for i, token in enumerate(ids) if i % 3 != 1] + [
        stop
    ]
