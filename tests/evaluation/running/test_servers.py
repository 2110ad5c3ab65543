"""method=server: rows, faults and the audit by a server that this test runs; and transformers' own server."""

import json
import socket
import subprocess
import sys
import time

import httpx2
import pandas as pd
import pytest
from transformers import AutoTokenizer

from evaluation import run
from evaluation.records.runs import read_runs
from model.files import ROOT
from tests.evaluation.conftest import answers_in
from tests.evaluation.running.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def plain(checkpoint):
    return FakeEngine(checkpoint)


@pytest.fixture
def engine(plain):
    """Without speculation and faults."""
    plain.fault, plain.changed, plain.name, plain.context, plain.delay = None, {}, "toy", 512, 0.0
    plain.asked, plain.most, plain.pages, plain.owner = 0, 0, {}, "vllm"
    plain.frames, plain.key = None, ""
    return plain


@pytest.fixture(scope="module")
def drafting(checkpoint):
    return FakeEngine(checkpoint, drafting=True)


@pytest.fixture
def served(evaluate):
    """A run of method=server, untyped settings by the fixture `evaluate`."""

    def running(engine, *words, name="served"):
        url = engine if isinstance(engine, str) else engine.url
        return evaluate("method=server", f"method.url={url}", f"name={name}", "timed=true", *words)

    return running


def rows(tmp_path, name="served"):
    table = pd.read_csv(tmp_path / f"results/{name}/tables/main.csv")
    return table[table["category"] == "overall"].set_index("method")


def test_a_server_is_a_row_next_to_methods_of_this_process(evaluate, served, engine, drafting, tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert evaluate("method=vanilla", "name=served").code == 0
    engine.pages = {"/version": ({"version": "0\x1b[2J"},)}
    assert served(engine).code == 0
    with_password = drafting.url.replace("//", "//me:secret@")
    outcome = served(f"{with_password}/v1/", "method.speculation=pairs", "method.dtype=float32")
    assert outcome.code == 0, outcome.err
    asked = drafting.asked
    assert served(drafting, "method.speculation=pairs").code == 0 and drafting.asked == asked, "one run"
    written = [path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert not any(b"secret" in data or b"\x1b" in data for data in written)
    table = rows(tmp_path)
    assert list(table.index) == ["vanilla", "vllm", "vllm (pairs)"]
    assert list(table["mat"][:2]) == [1.0, 1.0] and list(table["new_tokens"]) == [table["new_tokens"].iloc[0]] * 3
    answers = [choice for row in read_runs(tmp_path / "results/served")[2].answers for choice in row["choices"]]
    by_hand = [1 + len(ids[1:]) // 2 + len(ids[1:]) % 2 for choice in answers for ids in choice["output_ids"]]
    assert [steps for choice in answers for steps in choice["decoding_steps"]] == by_hand
    mat = table["new_tokens"].iloc[0] / sum(by_hand)
    assert table.loc["vllm (pairs)", "mat"] == pytest.approx(mat) and 1.5 < mat < 2
    assert table.loc["vllm (pairs)", "mean_acceptance_length"] == 2.0, "vLLM's own"
    assert table["speedup_server"].notna().tolist() == [False, True, True]
    assert table["speedup_vanilla"].notna().tolist() == [True, False, False]
    assert table["tokens_equal"].tolist()[1:] == [table["new_tokens"].iloc[0]] * 2 and table["tokens_wrong"].sum() == 0
    assert table.loc["vllm", "time_to_first_token_ms_p50"] > 0 and table.loc["vllm", "inter_token_latency_ms_p50"] >= 0
    assert "Lossless in float32" in outcome.out
    assert "vllm 0\\u001b[2J, model toy; threads, device and type are its own" in outcome.out
    assert "speedup over vanilla" not in outcome.out, "no baseline of this process is missed"
    assert not (tmp_path / "results/served/tables/audit.csv").exists(), "which compares token by token with vanilla"


def test_a_wrong_token_is_named_with_its_place_and_gap(served, engine, tmp_path):
    engine.changed = {3: 9}
    outcome = served(engine, "bench.categories=[qa]")
    assert "Not lossless in float32: " in outcome.out and "token 4 is" in outcome.out and "(gap " in outcome.out
    assert rows(tmp_path).loc["vllm", "tokens_wrong"] >= 1
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
    ask, at, kept = type(engine).stream, 4, []  # the warm-up's and two answers are there; later on the warm-up's alone

    def failing(self, handler, body):
        self.fault = fault if self.asked == at else None
        return ask(self, handler, body)

    with monkeypatch.context() as patched:
        patched.setattr(type(engine), "stream", failing)
        for fault, line in FAULTS.items():
            engine.asked = 0
            outcome = served(engine, *words)
            assert outcome.code == 2 and line in outcome.err and outcome.err.count(f"server {engine.url}") == 1, fault
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
        (["method.url=http://127.0.0.1:80a"], "server http://127.0.0.1:80a: not what auto sends (InvalidURL: "),
        (["method.speed=1"], "method.speed: no such setting"),
        *(([f"method.timeout={wrong}"], f"method.timeout={wrong}: must be more than 0") for wrong in ("0.0", "-1.0")),
        *(([f"method.timeout={wrong}"], f"method.timeout={wrong}: must be more than 0") for wrong in ("nan", "inf")),
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
        outcome = served(engine, "method.engine=sglang" if path == "/server_info" else "method.engine=auto")
        assert outcome.code == 2 and line in outcome.err and outcome.err.count("\n") == 1, outcome.err
    engine.pages, engine.context = {}, 256
    assert "has a context of 256 tokens, and the model 512" in served(engine).err
    engine.context, ask = 512, type(engine).stream

    def renamed(self, handler, body):
        self.context = 1024 if self.asked == 3 else 512
        return ask(self, handler, body)

    monkeypatch.setattr(type(engine), "stream", renamed)
    outcome = served(engine)
    assert outcome.code == 2 and "is another one now: context is 512 before and 1024 now" in outcome.err
    assert answers_in(tmp_path / "results"), "nothing is lost"


def test_a_turn_without_room_is_recorded_as_that(served, drafting, tmp_path):
    assert served(drafting, "bench.end=1").code == 0
    (choice,) = answers_in(tmp_path / "results")[0]["choices"]
    room = choice["prompt_tokens"][0] + 30  # the second turn's prompt has the first answer, too
    assert served(drafting, "bench.end=1", f"model.context={room}", name="short").code == 0
    (short,) = answers_in(tmp_path / "results/short")[0]["choices"]
    assert short["stop"][1] == "context" and short["decoding_steps"] == [choice["decoding_steps"][0], 0]
    mat = short["new_tokens"][0] / short["decoding_steps"][0]
    assert rows(tmp_path, "short")["mat"].tolist() == [pytest.approx(mat)]


def test_requests_at_the_same_time(served, drafting, tmp_path):
    """Speeds are of the whole, latencies of each request; drafts of single answers are not known without the flag."""
    drafting.delay, drafting.most = 0.2, 0
    assert served(drafting, "batch=3", "max_new_tokens=8").code == 0
    assert drafting.most == 3
    row = rows(tmp_path).loc["vllm (speculative)"]
    answers = [choice for answer in answers_in(tmp_path / "results") for choice in answer["choices"]]
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
    outcome = evaluate("-m", "method=server,vanilla", f"method.url={engine.url}", "timed=false", "name=served")
    assert outcome.code == 2 and "answers 500" in outcome.err
    assert [run.label for run in read_runs(tmp_path / "results/served") if run.complete] == ["vanilla"]


def test_an_end_that_is_not_shown_took_a_step(served, engine, tmp_path):
    """It is believed of a server that has no counters, too, if the user says that it does not speculate."""
    engine.fault, engine.pages = "hides", {"/metrics": ("no such path", 404, "text/plain")}
    assert served(engine, "method.speculation=none").code == 0
    choices = [choice for answer in answers_in(tmp_path / "results") for choice in answer["choices"]]
    assert all(ids[-1] == 2 and len(ids) == 5 for choice in choices for ids in choice["output_ids"])
    assert all(choice["decoding_steps"] == choice["new_tokens"] for choice in choices)
    engine.fault, engine.changed = None, {3: 2}
    outcome = served(engine, "max_new_tokens=8", name="behind")
    assert outcome.code == 2 and "4 tokens behind token 2, which is EOS of the model here" in outcome.err


def test_llama_cpp_is_asked_again_for_ids_that_its_stream_lacks(evaluate, served, engine, tmp_path):
    engine.owner = "llamacpp"
    assert served(engine).code == 0
    assert evaluate("method=vanilla", "name=plain").code == 0
    ids, own = (
        [choice["output_ids"] for answer in answers_in(tmp_path / "results" / name) for choice in answer["choices"]]
        for name in ("served", "plain")
    )
    assert ids == own
    assert rows(tmp_path)["mat"].tolist() == [1.0]


def frame(event):
    return f"data: {json.dumps(event)}\n\n".encode()


def spoken(pieces, finish, tokens, *, wait=0.0, last=0.0, **more):
    """A stream of a server that gives texts alone, and why it ends and the number of tokens in events of their own."""

    def frames(body):
        usage = {"prompt_tokens": None, "completion_tokens": tokens}
        choices = [{"index": 0, "text": piece, "finish_reason": None} | more for piece in pieces]
        yield from ((wait, frame({"choices": [choice]})) for choice in choices)
        yield last, frame({"choices": [{"index": 0, "text": "", "finish_reason": finish}]})
        yield 0.0, frame({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"

    return frames


def choices_in(tmp_path, name="served"):
    return [choice for answer in answers_in(tmp_path / "results" / name) for choice in answer["choices"]]


ONE = ("bench.categories=[qa]", "method.speculation=none", "timed=false")
MADE = [
    ("an answer begins as the text before it ends", "(the answer", "length", 4),
    ("with a space", " the answer", "length", 2),
    ("a server leaves that out", "the answer", "length", 2),
    ("none is there", "the answer", "length", 3),
    ("special words are words", " the </s> answer", "length", 7),
    ("EOS is counted", " the answer", "stop", 3),
    ("EOS is not counted", " the answer", "stop", 2),
    ("no number is given", " the answer", "stop", 0),
]


@pytest.mark.parametrize(("text", "finish", "tokens"), [case[1:] for case in MADE], ids=[case[0] for case in MADE])
def test_ids_are_made_of_text_and_prompt_together(served, engine, checkpoint, tmp_path, text, finish, tokens):
    """With a SentencePiece tokenizer an answer that began with no space had a token too many, and `</s>` was EOS."""
    engine.owner, engine.frames = "other", spoken([text], finish, tokens)
    outcome = served(engine, *ONE, f"max_new_tokens={tokens if finish == 'length' else 16}")
    assert outcome.code == 0, outcome.err
    (choice,) = choices_in(tmp_path)
    (ids,), tokenizer = choice["output_ids"], AutoTokenizer.from_pretrained(checkpoint)
    assert len(ids) == (tokens or 3) + (finish == "stop" and tokens == 2) and (ids[-1] == 2) is (finish == "stop")
    assert 2 not in ids[:-1] and 1 not in ids and choice["turns"] == [text]
    before = tokenizer("ASSISTANT:", add_special_tokens=False).input_ids
    assert tokenizer.decode(before + ids, skip_special_tokens=True).endswith(f"ASSISTANT:{text}") is (
        (text, tokens) != ("the answer", 2)
    )
    assert choice["new_tokens"] == choice["decoding_steps"] == [len(ids)] and choice["ids_remade"] == [True]


@pytest.mark.parametrize(
    ("text", "tokens", "more"),
    [
        (" the answer", 24, {}),
        (" the answer\ufffd", 24, {}),  # cut inside a character
        *((" the answer", 24, {part: "so"}) for part in ("reasoning", "thinking", "refusal", "x")),
        ("", 24, {"delta": {"content": " the answer"}}),
    ],
)
@pytest.mark.parametrize("finish", [pytest.param("length", marks=pytest.mark.slow), "stop"])
def test_without_ids_tokens_and_steps_are_the_engines_and_nothing_is_judged(
    served, engine, tmp_path, text, tokens, more, finish
):
    """MAT had mixed the ids made of a text with the engine's drafts, and a right answer was called not lossless."""
    drafts = {"speculative_decoding": {"num_accepted_draft_tokens": 12, "num_spec_steps": 11}}

    def frames(body):
        yield from spoken(list(text) or [""], finish, tokens, **more)(body)

    def measured(body):
        *parts, (_, end) = frames(body)
        yield from parts
        yield 0.0, frame({"choices": [], "metrics": drafts}) + end

    engine.owner, engine.frames = "other", measured
    outcome = served(engine, "max_new_tokens=24", "batch=2", "timed=false")
    assert outcome.code == 0, outcome.err
    table = rows(tmp_path).iloc[0]
    assert (table["mat"], table["new_tokens"]) == (2.0, 24 * 8)
    assert "Not audited: 8 of 8 answers" in outcome.out and "ossless" not in outcome.out
    assert all(choice["output_ids"] == [[]] * len(choice["turns"]) for choice in choices_in(tmp_path))
    assert {stop for choice in choices_in(tmp_path) for stop in choice["stop"]} == {finish.replace("stop", "eos")}
    header = (tmp_path / "results/served/tables/main.csv").read_text().splitlines()[0]
    assert "" not in header.split(","), "drafts of an engine without a name for its mean had made a column without one"


@pytest.mark.parametrize(
    ("text", "more"),
    [(" the answer\ufffd", {}), (" the answer", {"reasoning": "so"}), ("", {"content": " the answer"})],
)
def test_text_without_a_number_of_tokens_has_to_show_all(served, engine, text, more):
    engine.owner, engine.frames = "other", spoken([text], "length", 0, **more)
    outcome = served(engine, *ONE)
    assert outcome.code == 2 and "gives no number of tokens, and no text that shows all of them" in outcome.err


@pytest.mark.parametrize(
    ("text", "count", "tokens", "finish", "line"),
    [
        ("a", 4, 2, "length", "gives 4 ids of 2 tokens"),
        ("", 5, 5, "length", "gives 5 tokens where 4 were asked for"),  # 5 tokens' time was that of 4
        ("", 5, 0, "stop", "gives 5 tokens where 4 were asked for"),
        (" the answer the answer the", 0, 5, "length", "gives 5 tokens where 4 were asked for"),
        (" the answer the answer the", 0, 0, "stop", "gives no number of tokens, and no text that shows"),
        (" the\ufffd", 0, 6, "stop", "gives 5 tokens where 4 were asked for"),  # and an EOS that is counted
    ],
)
def test_more_tokens_than_are_counted_or_asked_for_are_an_error(served, engine, text, count, tokens, finish, line):
    usage = frame({"choices": [], "usage": {"prompt_tokens": None, "completion_tokens": tokens}})
    choice = {"text": text, "finish_reason": finish} | ({"token_ids": [7] * count} if count else {})
    engine.owner = "vllm" if count else "other"
    engine.frames = lambda body: [(0.0, frame({"choices": [choice]}) + usage)]
    outcome = served(engine, "max_new_tokens=4", *ONE)
    assert outcome.code == 2 and line in outcome.err


def test_drafts_without_a_number_of_tokens_give_no_steps(served, engine, tmp_path):
    """They are counted with the engine's ids: ids made of the text had had a MAT of their own."""
    drafts = {"choices": [], "metrics": {"speculative_decoding": {"num_accepted_draft_tokens": 2, "num_spec_steps": 1}}}
    *parts, end = spoken([" the answer the answer"], "length", 0)(None)
    engine.owner, engine.frames = "other", lambda body: [*parts, (0.0, frame(drafts)), end]
    assert served(engine, *ONE[:1], "timed=false", "max_new_tokens=4").code == 0
    (choice,) = choices_in(tmp_path)
    assert choice["decoding_steps"] == [None] and choice["new_tokens"] == [4] and choice["ids_remade"] == [True]
    assert pd.isna(rows(tmp_path)["mat"].item())


def test_a_part_outside_the_text_takes_time_from_its_first_event_on(served, engine, tmp_path):
    """All of the reasoning had been a part of the prefill."""

    def frames(body):
        for wait in (0.0, 0.3):
            yield wait, frame({"choices": [{"index": 0, "text": "", "reasoning": "so", "finish_reason": None}]})
        yield from spoken([" the answer"], "length", body["max_tokens"], wait=0.3)(body)

    engine.owner, engine.frames = "other", frames
    assert served(engine, "bench.categories=[qa]").code == 0
    (choice,) = choices_in(tmp_path)
    assert choice["first_token_time"][0] < 0.3 and choice["decode_time"][0] >= 0.6
    assert len(choice["step_us"][0]) == 4, "two events of reasoning, one of text, and the end"


@pytest.mark.parametrize("batch", [1, 2])
def test_an_end_that_is_not_shown_took_its_time(served, engine, tmp_path, batch):
    """Its step was counted and its time was not: 7 tokens in the time of 6."""
    engine.owner, engine.frames = "other", spoken([" the"] * 3, "stop", 4, wait=0.05, last=0.5)
    words = ("bench.begin=1", "bench.end=3", "method.speculation=none")
    assert served(engine, f"batch={batch}", *words).code == 0
    choices = choices_in(tmp_path)
    assert len(choices) == 2
    assert all(ids[-1] == 2 for choice in choices for ids in choice["output_ids"])
    assert all(seconds >= 0.3 / batch for choice in choices for seconds in choice["decode_time"])
    assert all(len(turn) == 4 and turn[3] >= 3e5 for choice in choices for turn in choice["step_us"])


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        (2, b""),
        (7, b"data: [DONE]\n\n"),
        pytest.param(2, b"data: [DONE]\n\n", marks=pytest.mark.slow),
        pytest.param(7, b"", marks=pytest.mark.slow),
    ],
)
def test_an_end_without_a_reason(served, engine, tmp_path, last, ending):
    """EOS or the limit is reached, and finish_reason stays null; before that, the stream broke off."""

    def frames(body):
        yield 0.0, frame({"choices": [{"text": "", "token_ids": [7, 8, last], "finish_reason": None}]}) + ending

    engine.frames = frames
    assert served(engine, "max_new_tokens=3", *ONE).code == 0
    assert choices_in(tmp_path)[0]["stop"] == ["eos" if last == 2 else "length"]
    outcome = served(engine, "max_new_tokens=4", *ONE, name="more")
    assert outcome.code == (0 if last == 2 else 2) and ("the stream broke off" in outcome.err) is (last == 7)


def test_a_text_up_to_the_limit_without_a_reason(served, engine, tmp_path):
    engine.owner, engine.frames = "other", spoken([" the answer"], None, 2)
    assert served(engine, "max_new_tokens=2", *ONE).code == 0
    assert choices_in(tmp_path)[0]["stop"] == ["length"]
    outcome = served(engine, "max_new_tokens=3", *ONE, name="more")
    assert outcome.code == 2 and "the stream broke off" in outcome.err


def test_a_number_type_that_is_named_later_counts(served, engine, tmp_path):
    """It had been ignored in silence, and the first verdict stayed."""
    assert "a forward a token" in served(engine, *ONE).out
    asked, said = engine.asked, []
    for dtype in ("bfloat16", "bfloat16", "null"):
        outcome = served(engine, *ONE, f"method.dtype={dtype}")
        assert outcome.code == 0, outcome.err
        said.append([word for word in ("in bfloat16, a forward", "in float32, a forward") if word in outcome.out])
        (run_,) = read_runs(tmp_path / "results/served")
        assert run_.summary["audit"]["made_in"] == (None if dtype == "null" else dtype)
    assert said == [["in bfloat16, a forward"], [], ["in float32, a forward"]] and engine.asked == asked


def test_a_router_of_llama_cpp(served, engine, tmp_path):
    """It wants the model's name for counters, knows the context when the model is loaded, and may have no counters."""
    engine.owner, engine.name, loads = "llamacpp", "a/b c", type(engine).stream
    counters = "llamacpp:spec_decode_num_drafts_total {n}\nllamacpp:spec_decode_num_accepted_tokens_total {n}\n"

    def stream(self, handler, body):
        self.pages["/v1/models"] = ({"data": [{"id": "a/b c", "owned_by": "llamacpp", "meta": {"n_ctx": 512}}]},)
        self.pages["/metrics?model=a%2Fb%20c"] = (counters.format(n=self.asked + 1), 200, "text/plain")
        return loads(self, handler, body)

    for missing in (400, 501, 503, 200):
        engine.pages = {"/v1/models": ({"data": [{"id": "a/b c", "owned_by": "llamacpp"}]},)}
        engine.pages["/metrics"] = engine.pages["/metrics?model=a%2Fb%20c"] = ("model name is missing", missing)
        if missing == 200:
            engine.pages["/metrics?model=a%2Fb%20c"] = (counters.format(n=0), 200, "text/plain")
            engine.pages["/metrics"] = ("model name is missing", 400)
        patch = pytest.MonkeyPatch()
        if missing == 200:
            patch.setattr(type(engine), "stream", stream)
        outcome = served(engine, "bench.categories=[qa]", name=str(missing))
        patch.undo()
        assert outcome.code == 0, outcome.err
        table = rows(tmp_path, str(missing))
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
        assert outcome.code == 2 and "OPENAI_API_KEY: holds characters" in outcome.err and "secret" not in outcome.err
    monkeypatch.setenv("OPENAI_API_KEY", f"{engine.key}\n")
    outcome = served(engine)
    assert outcome.code == 0, outcome.err
    written = [path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert not any(b"secret" in data for data in (*written, outcome.out.encode(), outcome.err.encode()))


@pytest.fixture(scope="module")
def transformers_serve():
    """The address of `transformers serve` with the embedded model; it cannot stream the toy's text."""
    pytest.importorskip("openai", reason="tests/requirements.txt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(ROOT / "data/embedded"), "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    entry = "from transformers.cli.transformers import main; main()"
    with subprocess.Popen([sys.executable, "-c", entry, *words], stderr=subprocess.DEVNULL) as process:
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
    words = ["name=served", f"results_dir={tmp_path / 'results'}", "bench.per_category=1", "max_new_tokens=48"]
    assert call(run.main, "method=hf", *words).code == 0
    outcome = call(run.main, "method=server", f"method.url={transformers_serve}", *words)
    assert outcome.code == 0, outcome.err
    table = rows(tmp_path)
    row = table.loc["other (speculation unknown)"]
    assert pd.isna(row["mat"]) and row["tokens_per_second"] > 0
    assert row["new_tokens"] == table.loc["hf", "new_tokens"] and row["questions"] == table.loc["hf", "questions"]
    assert "token ids were made from its text" in outcome.out and "there is text alone" in outcome.out
    assert row["tokens_wrong"] == 0
