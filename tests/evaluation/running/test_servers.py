"""method=server: rows, faults and the audit by a server that this test runs; and transformers' own server."""

import json
import socket
import subprocess
import sys
import time

import httpx2
import pandas as pd
import pytest

from evaluation import run
from evaluation.records.runs import read_runs
from model.files import ROOT
from tests.evaluation.conftest import answers_in
from tests.evaluation.running.fake_engine import ONE, served_rows


def test_a_server_is_a_row_next_to_methods_of_this_process(
    evaluate, served, engine, drafting, tmp_path, monkeypatch
):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert evaluate("method=vanilla", "name=served").code == 0
    engine.pages = {"/version": ({"version": "0\x1b[2J"},)}
    assert served(engine).code == 0
    with_password = drafting.url.replace("//", "//me:secret@")
    outcome = served(f"{with_password}/v1/", "method.speculation=pairs", "method.dtype=float32")
    assert outcome.code == 0, outcome.err
    asked = drafting.asked
    assert served(drafting, "method.speculation=pairs").code == 0 and drafting.asked == asked, (
        "one run"
    )
    written = [path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert not any(b"secret" in data or b"\x1b" in data for data in written)
    table = served_rows(tmp_path)
    assert list(table.index) == ["vanilla", "vllm", "vllm (pairs)"]
    assert (
        list(table["mat"][:2]) == [1.0, 1.0]
        and list(table["new_tokens"]) == [table["new_tokens"].iloc[0]] * 3
    )
    answers = [
        choice
        for row in read_runs(tmp_path / "results/served")[2].answers
        for choice in row["choices"]
    ]
    by_hand = [
        1 + len(ids[1:]) // 2 + len(ids[1:]) % 2
        for choice in answers
        for ids in choice["output_ids"]
    ]
    assert [steps for choice in answers for steps in choice["decoding_steps"]] == by_hand
    mat = table["new_tokens"].iloc[0] / sum(by_hand)
    assert table.loc["vllm (pairs)", "mat"] == pytest.approx(mat) and 1.5 < mat < 2
    assert table.loc["vllm (pairs)", "mean_acceptance_length"] == 2.0, "vLLM's own"
    assert table["speedup_server"].notna().tolist() == [False, True, True]
    assert table["speedup_vanilla"].notna().tolist() == [True, False, False]
    assert (
        table["tokens_equal"].tolist()[1:] == [table["new_tokens"].iloc[0]] * 2
        and table["tokens_wrong"].sum() == 0
    )
    assert (
        table.loc["vllm", "time_to_first_token_ms_p50"] > 0
        and table.loc["vllm", "inter_token_latency_ms_p50"] >= 0
    )
    assert "Lossless in float32" in outcome.out
    assert "vllm 0\\u001b[2J, model toy; threads, device and type are its own" in outcome.out
    assert "speedup over vanilla" not in outcome.out, "no baseline of this process is missed"
    assert not (tmp_path / "results/served/tables/audit.csv").exists(), (
        "which compares token by token with vanilla"
    )


def test_a_wrong_token_is_named_with_its_place_and_gap(served, engine, tmp_path):
    engine.changed = {3: 9}
    outcome = served(engine, "bench.categories=[qa]")
    assert (
        "Not lossless in float32: " in outcome.out
        and "token 4 is" in outcome.out
        and "(gap " in outcome.out
    )
    assert served_rows(tmp_path).loc["vllm", "tokens_wrong"] >= 1
    summary = json.loads(next((tmp_path / "results/served").rglob("summary.json")).read_text())
    assert "(gap " in summary["audit"]["words"]["13, turn 1"]
    asked = engine.asked
    assert "Not lossless" not in served(engine, "bench.categories=[qa]").out, "judged once"
    assert engine.asked == asked, "and a finished run asks nothing"


FAULTS = {
    "500": "answers 500 to /v1/completions: out of memory",
    "refuses": "answers 404 to /v1/completions: {",
    "breaks": "an answer has no end: the stream broke off",
    "error": "CUDA error",
    "hangs": "silent for 0.5 s (method.timeout)",
    "words": "'8' where a whole number is due",
    "drops": "gives 7 ids of 8 tokens",
    "stop word": "stopped at ###, which is no EOS here",
}


def test_a_fault_is_a_line_and_the_run_goes_on_from_there(served, engine, tmp_path, monkeypatch):
    words = ("max_new_tokens=8", "method.timeout=0.5")
    # the warm-up's and two answers are there; later on the warm-up's alone
    ask, at, kept = (
        type(engine).stream,
        4,
        [],
    )

    def failing(self, handler, body):
        self.fault = fault if self.asked == at else None
        return ask(self, handler, body)

    with monkeypatch.context() as patched:
        patched.setattr(type(engine), "stream", failing)
        for fault, line in FAULTS.items():
            engine.asked = 0
            outcome = served(engine, *words)
            assert (
                outcome.code == 2
                and line in outcome.err
                and outcome.err.count(f"server {engine.url}") == 1
            ), fault
            kept, at = kept or answers_in(tmp_path / "results"), 2
            assert 0 < len(kept) < 7 and answers_in(tmp_path / "results") == kept, fault
    engine.fault = None
    assert served(engine, *words).code == 0
    finished = answers_in(tmp_path / "results")
    assert len(finished) == 7 and finished[: len(kept)] == kept


def test_a_server_that_is_not_there_or_is_another_one(served, engine, tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        outcome = served(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert outcome.code == 2 and "not in reach" in outcome.err and outcome.err.count("\n") == 1
    for words, line in (
        (["method.url=null"], "method.url: has to be given"),
        (["method.model=other"], "method.model=other: name one of its models (toy)"),
        (["method.engine=sglang"], "/generate: no such path"),
        (["method.speculation=eagle"], f"method.speculation=eagle: server {engine.url} says none"),
        (
            ["method.url=http://127.0.0.1:80a"],
            "server http://127.0.0.1:80a: not what auto sends (InvalidURL: ",
        ),
        (["method.speed=1"], "method.speed: no such setting"),
        *(
            ([f"method.timeout={wrong}"], f"method.timeout={wrong}: must be more than 0")
            for wrong in ("0.0", "-1.0")
        ),
        *(
            ([f"method.timeout={wrong}"], f"method.timeout={wrong}: must be more than 0")
            for wrong in ("nan", "inf")
        ),
        (["sampling.temperature=1"], "sampling.temperature: a server is asked for greedy answers"),
    ):
        outcome = served(engine, *words)
        assert outcome.code == 2 and line in outcome.err, outcome.err
    for path, page, line in (
        ("/v1/models", ({"data": [{"name": "x"}]},), "not what auto sends (KeyError: 'id')"),
        ("/metrics", ({"requests": 1},), "not what auto sends (TypeError: "),
        ("/metrics", ("<html>\nNot here\n", 200, "text/html"), "not what auto sends (ValueError: "),
        ("/version", ("no key", 401, "text/plain"), "answers 401 to /version: no key"),
        ("/version", ("elsewhere", 307, "text/plain"), "answers 307 to /version: elsewhere"),
        ("/server_info", ("text", 200, "text/plain"), "not what sglang sends (AttributeError: "),
    ):
        engine.pages = {path: page}
        outcome = served(
            engine, "method.engine=sglang" if path == "/server_info" else "method.engine=auto"
        )
        assert outcome.code == 2 and line in outcome.err and outcome.err.count("\n") == 1, (
            outcome.err
        )
    engine.pages, engine.context = {}, 256
    assert "has a context of 256 tokens, and the model 512" in served(engine).err
    engine.context, ask = 512, type(engine).stream

    def renamed(self, handler, body):
        self.context = 1024 if self.asked == 3 else 512
        return ask(self, handler, body)

    monkeypatch.setattr(type(engine), "stream", renamed)
    outcome = served(engine)
    assert (
        outcome.code == 2
        and "is another one now: context is 512 before and 1024 now" in outcome.err
    )
    assert answers_in(tmp_path / "results"), "nothing is lost"


def test_a_turn_without_room_is_recorded_as_that(served, drafting, tmp_path):
    assert served(drafting, "bench.end=1").code == 0
    (choice,) = answers_in(tmp_path / "results")[0]["choices"]
    room = choice["prompt_tokens"][0] + 30  # the second turn's prompt has the first answer, too
    assert served(drafting, "bench.end=1", f"model.context={room}", name="short").code == 0
    (short,) = answers_in(tmp_path / "results/short")[0]["choices"]
    assert short["stop"][1] == "context" and short["decoding_steps"] == [
        choice["decoding_steps"][0],
        0,
    ]
    mat = short["new_tokens"][0] / short["decoding_steps"][0]
    assert served_rows(tmp_path, "short")["mat"].tolist() == [pytest.approx(mat)]


def test_requests_at_the_same_time(served, drafting, tmp_path):
    """Speeds are of the whole, latencies of each request; drafts of single answers are not known without the flag."""
    drafting.delay, drafting.most = 0.2, 0
    assert served(drafting, "batch=3", "max_new_tokens=8").code == 0
    assert drafting.most == 3
    row = served_rows(tmp_path).loc["vllm (speculative)"]
    answers = [
        choice for answer in answers_in(tmp_path / "results") for choice in answer["choices"]
    ]
    seconds = sum(sum(choice["wall_time"]) for choice in answers)
    assert 4 * 0.2 < seconds < 8 * 0.2, "eight turns, three at a time"
    assert row["tokens_per_second_total"] == pytest.approx(row["new_tokens"] / seconds)
    assert row["time_to_first_token_ms_p50"] > 200 and pd.isna(row["mat"])
    drafting.delay = 0.0


def test_an_error_waits_for_no_other_request(served, engine, monkeypatch):
    ask = type(engine).stream

    def failing(self, handler, body):
        if self.asked < 4:  # the warm-up's
            return ask(self, handler, body)
        self.fault = "500" if self.asked == 4 else "hangs"
        if self.fault == "hangs":
            time.sleep(30)
        return ask(self, handler, body)

    monkeypatch.setattr(type(engine), "stream", failing)
    start = time.perf_counter()
    outcome = served(engine, "batch=3", "max_new_tokens=8")
    assert outcome.code == 2 and "answers 500" in outcome.err and time.perf_counter() - start < 25


def test_a_fault_takes_no_other_method_along(evaluate, engine, tmp_path):
    engine.fault = "500"
    outcome = evaluate(
        "-m", "method=server,vanilla", f"method.url={engine.url}", "timed=false", "name=served"
    )
    assert outcome.code == 2 and "answers 500" in outcome.err
    assert [run.label for run in read_runs(tmp_path / "results/served") if run.complete] == [
        "vanilla"
    ]


def test_an_end_that_is_not_shown_took_a_step(served, engine, tmp_path):
    """It is believed of a server that has no counters, too, if the user says that it does not speculate."""
    engine.fault, engine.pages = "hides", {"/metrics": ("no such path", 404, "text/plain")}
    assert served(engine, "method.speculation=none").code == 0
    choices = [
        choice for answer in answers_in(tmp_path / "results") for choice in answer["choices"]
    ]
    assert all(ids[-1] == 2 and len(ids) == 5 for choice in choices for ids in choice["output_ids"])
    assert all(choice["decoding_steps"] == choice["new_tokens"] for choice in choices)
    engine.fault, engine.changed = None, {3: 2}
    outcome = served(engine, "max_new_tokens=8", name="behind")
    assert (
        outcome.code == 2
        and "4 tokens behind token 2, which is EOS of the model here" in outcome.err
    )


def test_llama_cpp_is_asked_again_for_ids_that_its_stream_lacks(evaluate, served, engine, tmp_path):
    engine.owner = "llamacpp"
    assert served(engine).code == 0
    assert evaluate("method=vanilla", "name=plain").code == 0
    ids, own = (
        [
            choice["output_ids"]
            for answer in answers_in(tmp_path / "results" / name)
            for choice in answer["choices"]
        ]
        for name in ("served", "plain")
    )
    assert ids == own
    assert served_rows(tmp_path)["mat"].tolist() == [1.0]


def test_a_number_type_that_is_named_later_counts(served, engine, tmp_path):
    """It had been ignored in silence, and the first verdict stayed."""
    assert "a forward a token" in served(engine, *ONE).out
    asked, said = engine.asked, []
    for dtype in ("bfloat16", "bfloat16", "null"):
        outcome = served(engine, *ONE, f"method.dtype={dtype}")
        assert outcome.code == 0, outcome.err
        said.append(
            [
                word
                for word in ("in bfloat16, a forward", "in float32, a forward")
                if word in outcome.out
            ]
        )
        (run_,) = read_runs(tmp_path / "results/served")
        assert run_.summary["audit"]["made_in"] == (None if dtype == "null" else dtype)
    assert (
        said == [["in bfloat16, a forward"], [], ["in float32, a forward"]]
        and engine.asked == asked
    )


def test_a_router_of_llama_cpp(served, engine, tmp_path):
    """It wants the model's name for counters, knows the context when the model is loaded, and may have no counters."""
    engine.owner, engine.name, loads = "llamacpp", "a/b c", type(engine).stream
    counters = "llamacpp:spec_decode_num_drafts_total {n}\nllamacpp:spec_decode_num_accepted_tokens_total {n}\n"

    def stream(self, handler, body):
        self.pages["/v1/models"] = (
            {"data": [{"id": "a/b c", "owned_by": "llamacpp", "meta": {"n_ctx": 512}}]},
        )
        self.pages["/metrics?model=a%2Fb%20c"] = (
            counters.format(n=self.asked + 1),
            200,
            "text/plain",
        )
        return loads(self, handler, body)

    for missing in (400, 501, 503, 200):
        engine.pages = {"/v1/models": ({"data": [{"id": "a/b c", "owned_by": "llamacpp"}]},)}
        engine.pages["/metrics"] = engine.pages["/metrics?model=a%2Fb%20c"] = (
            "model name is missing",
            missing,
        )
        if missing == 200:
            engine.pages["/metrics?model=a%2Fb%20c"] = (counters.format(n=0), 200, "text/plain")
            engine.pages["/metrics"] = ("model name is missing", 400)
        patch = pytest.MonkeyPatch()
        if missing == 200:
            patch.setattr(type(engine), "stream", stream)
        outcome = served(engine, "bench.categories=[qa]", name=str(missing))
        patch.undo()
        assert outcome.code == 0, outcome.err
        table = served_rows(tmp_path, str(missing))
        assert ("mean_len" in table and bool(table["mean_len"].notna().all())) is (missing == 200)


def test_a_key_is_sent_and_kept_nowhere(served, engine, tmp_path, monkeypatch):
    engine.key = "sk-12345.secret"
    for given in ("", "sk-other.secret"):
        monkeypatch.setenv("OPENAI_API_KEY", given)
        outcome = served(engine)
        assert outcome.code == 2 and "answers 401 to /v1/models" in outcome.err
        assert not given or given not in outcome.err, "a server may repeat it"
    for given in ("sk-1\nsecret", "sk-secret\u00e9"):
        monkeypatch.setenv("OPENAI_API_KEY", given)
        outcome = served(engine)
        assert (
            outcome.code == 2
            and "OPENAI_API_KEY: holds characters" in outcome.err
            and "secret" not in outcome.err
        )
    monkeypatch.setenv("OPENAI_API_KEY", f"{engine.key}\n")
    outcome = served(engine)
    assert outcome.code == 0, outcome.err
    written = [path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert not any(
        b"secret" in data for data in (*written, outcome.out.encode(), outcome.err.encode())
    )


@pytest.fixture(scope="module")
def transformers_serve():
    """The address of `transformers serve` with the embedded model; it cannot stream the toy's text."""
    pytest.importorskip("openai", reason="tests/requirements.txt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "serve",
        str(ROOT / "data/embedded"),
        "--port",
        str(port),
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    entry = "from transformers.cli.transformers import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", entry, *words], stderr=subprocess.DEVNULL
    ) as process:
        for _ in range(240):
            try:
                if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx2.HTTPError:
                time.sleep(0.25)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@pytest.mark.slow
def test_transformers_serve(call, transformers_serve, tmp_path):
    """It takes texts and gives texts: ids are made from these, and nothing is said of steps."""
    words = [
        "name=served",
        f"results_dir={tmp_path / 'results'}",
        "bench.per_category=1",
        "max_new_tokens=48",
    ]
    assert call(run.main, "method=hf", *words).code == 0
    outcome = call(run.main, "method=server", f"method.url={transformers_serve}", *words)
    assert outcome.code == 0, outcome.err
    table = served_rows(tmp_path)
    row = table.loc["other (speculation unknown)"]
    assert pd.isna(row["mat"]) and row["tokens_per_second"] > 0
    assert (
        row["new_tokens"] == table.loc["hf", "new_tokens"]
        and row["questions"] == table.loc["hf", "questions"]
    )
    assert (
        "token ids were made from its text" in outcome.out and "there is text alone" in outcome.out
    )
    assert row["tokens_wrong"] == 0
