"""method=server: rows, faults and the audit by a server that this test runs."""

import shutil
import socket
import threading
import time
from itertools import chain

import pandas as pd
import pytest

from evaluation.records.runs import read_runs
from tests.evaluation.conftest import answers_in
from tests.evaluation.running.fake_engine import ONE, TEXT, choices_in, served_rows


def written(tmp_path):
    """All bytes of the results."""
    files = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files)


def test_a_server_is_a_row_next_to_methods_of_this_process(
    evaluate, served, engine, drafting, tmp_path, monkeypatch
):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert evaluate("method=vanilla", "name=served").code == 0
    assert served(engine).code == 0
    with_password = drafting.url.replace("//", "//me:secret@")
    outcome = served(f"{with_password}/v1/", "method.speculation=pairs", "method.dtype=float32")
    assert outcome.code == 0, outcome.err
    asked = drafting.asked
    assert served(drafting, "method.speculation=pairs").code == 0
    assert drafting.asked == asked, "it is the same run"
    assert b"secret" not in written(tmp_path)

    table = served_rows(tmp_path)
    assert list(table.index) == ["vanilla", "vllm", "vllm (pairs)"]
    tokens = table["new_tokens"].iloc[0]
    assert set(table["new_tokens"]) == {tokens}
    drafted = read_runs(tmp_path / "results/served")[2].answers
    ids = chain.from_iterable(row["choices"][0]["output_ids"] for row in drafted)
    steps = sum(1 + len(answer) // 2 for answer in ids)
    assert list(table["mat"]) == [1.0, 1.0, pytest.approx(tokens / steps)]
    assert table["mean_acceptance_length"].iloc[2] == 2.0, "vLLM's own"
    assert table["speedup_server"].notna().tolist() == [False, True, True]
    assert table["speedup_vanilla"].notna().tolist() == [True, False, False]
    assert table["tokens_equal"].tolist()[1:] == [tokens] * 2 and table["tokens_wrong"].sum() == 0
    assert table.loc["vllm", "time_to_first_token_ms_p50"] > 0
    assert "Lossless in float32" in outcome.out
    assert "speedup over vanilla" not in outcome.out, "no baseline of this process is missed"
    assert not (tmp_path / "results/served/tables/audit.csv").exists()


def test_a_wrong_token_is_named_and_judged_again_in_another_number_type(served, engine, tmp_path):
    engine.changed = {3: 9}
    outcome = served(engine, *ONE)
    assert "Not lossless in float32: " in outcome.out and "token 4 is" in outcome.out
    assert served_rows(tmp_path).loc["vllm", "tokens_wrong"] >= 1
    asked = engine.asked
    for dtype, judged in (("bfloat16", True), ("bfloat16", False), ("null", True)):
        outcome = served(engine, *ONE, f"method.dtype={dtype}")
        assert ("a forward a token" in outcome.out) is judged, dtype
        (run_,) = read_runs(tmp_path / "results/served")
        assert run_.summary["audit"]["made_in"] == (None if dtype == "null" else dtype)
    assert engine.asked == asked, "a finished run asks nothing"


FAULTS = {
    "breaks": (lambda stream: stream[:2], "an answer has no end: the stream broke off"),
    "error": (lambda stream: [*stream[:2], {"error": {"message": "CUDA\nerror"}}], "CUDA error"),
    "drops": (lambda stream: stream[:2] + stream[3:], " ids of "),
    "stop word": (lambda stream: hidden_end(stream, "###"), "stopped at ###, which is no EOS here"),
}
PAGES = {
    "500": (("out of\nmemory", 500, TEXT), "answers 500 to /v1/completions: out of memory"),
    "refused": (({"error": "no such model"}, 404), "answers 404 to /v1/completions: {"),
}


def test_without_an_audit_no_weights_are_loaded(served, engine, tmp_path, checkpoint):
    bare = shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safe*"))
    words = ("model=path", f"model.path={bare}", "model.name=toy", "model.context=512")
    outcome = served(engine, *ONE, *words, "method.audit=false")
    assert outcome.code == 0, outcome.err
    assert "ossless" not in outcome.out and served_rows(tmp_path).loc["vllm", "new_tokens"] > 0
    assert "no weights" in served(engine, *ONE, *words).err


def hidden_end(stream, stopped_by=None):
    """Four tokens of an answer that ends by an EOS, or by another word, that is not shown."""
    answer = stream[:4]
    last = stream[-1]
    answer[-1]["choices"][0] |= {"finish_reason": "stop", "stop_reason": stopped_by}
    last["usage"]["completion_tokens"] = 4
    return [*answer, last]


def test_a_fault_is_a_line_and_the_run_goes_on_from_there(served, engine, tmp_path):
    words = ("max_new_tokens=8",)
    kept = []

    def refused(line, *more):
        outcome = served(engine, *words, *more)
        assert outcome.code == 2 and line in outcome.err, outcome.err
        assert outcome.err.count(f"server {engine.url}") == 1
        answers = answers_in(tmp_path / "results") if kept else []
        assert answers == kept

    def third_fails(stream):
        return FAULTS["breaks"][0](stream) if engine.asked == 4 else stream

    engine.fault = third_fails  # of the warm-up's and four answers
    assert served(engine, *words).code == 2
    kept += answers_in(tmp_path / "results")
    assert 0 < len(kept) < 7
    for fault, line in FAULTS.values():
        engine.fault = fault
        refused(line)
    engine.fault = lambda stream: [*stream[:2], lambda: engine.restarted.wait(60)]
    refused("silent for 0.3 s (method.timeout)", "method.timeout=0.3")
    for page, line in PAGES.values():
        engine.pages = {"/v1/completions": page}
        refused(line)
    engine.reset()
    assert served(engine, *words).code == 0
    finished = answers_in(tmp_path / "results")
    assert len(finished) == 7 and finished[: len(kept)] == kept


WRONG = {
    "method.url=null": "method.url: has to be given",
    "method.url=http://127.0.0.1:80a": "http://127.0.0.1:80a: not what auto sends (InvalidURL: ",
    "method.model=other": "method.model=other: name one of its models (toy)",
    "method.engine=sglang": "/generate: no such path",
    "method.speculation=eagle": "method.speculation=eagle: server ",
    "method.timeout=nan": "method.timeout=nan: must be more than 0",
    "sampling.temperature=1": "sampling.temperature: a server is asked for greedy answers",
}
OTHER_PAGES = [
    ("/v1/models", ({"data": [{"name": "x"}]},), "not what auto sends (KeyError: 'id')"),
    ("/metrics", ("<html>\nNot here\n", 200, "text/html"), "not what auto sends (ValueError: "),
    ("/version", ("elsewhere", 307, TEXT), "answers 307 to /version: elsewhere"),
]


def test_a_server_that_is_not_there_or_is_another_one(served, engine, tmp_path):
    def refused(line, *words, url=engine):
        outcome = served(url, *words)
        assert outcome.code == 2 and line in outcome.err, outcome.err
        assert outcome.err.count("\n") == 1

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        refused("not in reach", url=f"http://127.0.0.1:{free.getsockname()[1]}")
    for words, line in WRONG.items():
        refused(line, words)
    for path, page, line in OTHER_PAGES:
        engine.pages = {path: page}
        refused(line)
    engine.reset()
    engine.context = 256
    refused("has a context of 256 tokens, and the model 512")
    engine.reset()

    def restarted(stream):
        engine.context = 1024 if engine.asked == 3 else 512
        return stream

    engine.fault = restarted
    outcome = served(engine)
    assert "is another one now: context is 512 before and 1024 now" in outcome.err
    assert answers_in(tmp_path / "results"), "nothing is lost"


def test_requests_at_the_same_time(served, drafting, tmp_path):
    """Speeds are of the whole, latencies of each request; single answers' drafts are not known."""
    # of the warm-up and of seven questions, the first in two turns; a barrier waits for its requests
    barriers = [threading.Barrier(size) for size in (3, 3, 1, 3, 1)]
    places = iter([barrier for barrier in barriers for _ in range(barrier.parties)])

    def waiting(stream):
        barrier = next(places)
        return [lambda: barrier.wait(60), lambda: time.sleep(0.2), *stream]

    drafting.fault = waiting
    assert served(drafting, "batch=3", "max_new_tokens=8").code == 0
    assert drafting.most == 3
    row = served_rows(tmp_path).loc["vllm (speculative)"]
    choices = choices_in(tmp_path)
    seconds = [choice["wall_time"] for choice in choices]
    latencies = [[sum(turn) / 1e6 for turn in choice["step_us"]] for choice in choices]
    for group in ((0, 1, 2), (3, 4, 5)):
        together = sum(seconds[index][0] for index in group)
        of_each = [latencies[index][0] for index in group]
        assert max(of_each) - 1e-3 <= together < 0.75 * sum(of_each)
    assert row["tokens_per_second_total"] == pytest.approx(
        row["new_tokens"] / sum(map(sum, seconds))
    )
    assert row["time_to_first_token_ms_p50"] > 200 and pd.isna(row["mat"])
    drafting.reset()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("sk-other.secret", "answers 401 to /v1/models"),
        ("sk-1\nsecret", "OPENAI_API_KEY: holds characters"),
        ("sk-12345.secret\n", ""),
    ],
)
def test_a_key_is_sent_and_kept_nowhere(served, engine, tmp_path, monkeypatch, given, line):
    engine.key = "sk-12345.secret"
    monkeypatch.setenv("OPENAI_API_KEY", given)
    outcome = served(engine, *ONE)
    assert (outcome.code == 0) is (not line) and line in outcome.err
    assert given.strip() not in outcome.out + outcome.err, "a server may repeat it"
    assert b"secret" not in written(tmp_path)
