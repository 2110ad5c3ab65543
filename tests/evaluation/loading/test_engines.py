"""What engines say, and what is made of it: streams recorded from llama.cpp and vLLM, others made from their code."""

import json
from functools import partial
from pathlib import Path

import httpx2
import pytest

from evaluation.loading.server import ENGINES, Reply, Server, counted

STREAMS = Path(__file__).with_name("streams")
DRAFTS = "spec_decode_num_drafts_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"


def read(engine: str, events: list[dict], **moved: float) -> Reply:
    """The reply of these events; `moved`: the server's counters without the engine's prefix."""
    kind = ENGINES[engine]
    reply = Reply()
    for event in events:
        kind.read(event, reply)
    kind.count({f"{kind.prefix}{name}": value for name, value in moved.items()}, reply)
    return reply


def recorded(name: str) -> list[dict]:
    lines = (STREAMS / f"{name}.sse").read_text().splitlines()
    data = [line.removeprefix("data: ") for line in lines]
    return [json.loads(line) for line in data if line.startswith("{")]


def test_llama_cpp_counted_one_draft_of_16_tokens_in_64_forwards():
    """Recorded from its server with ngram-map-k; its n_decode_total rose by 64 meanwhile."""
    out = read("llamacpp", recorded("llamacpp"), **{DRAFTS: 1.0, ACCEPTED: 16.0})
    assert (out.tokens, len(out.ids), out.steps, out.finish) == (80, 80, 64, "length")
    assert out.means == {"mean_len": (17, 1)}, "over the one step that had a draft: no MAT"
    assert out.ids[:3] == [19556, 28, 33662] and out.text.startswith("Hello, hello")
    assert (out.prompt_tokens, out.speculation) == (37, "ngram-map-k")
    without = read("llamacpp", recorded("llamacpp"))
    assert without.steps == 64 and not without.means


def test_llama_cpp_streams_no_id_inside_a_character():
    """Recorded from its server: an emoji is three tokens, of which the stream has the last."""
    out = read("llamacpp", recorded("llamacpp_emoji"))
    assert (len(out.ids), out.tokens, out.text) == (8, 24, " 😊🎉" + 6 * "🐍")
    assert out.stopped_by is None and out.steps == 24, "nothing was drafted"


def test_vllm_counts_drafts_by_answer_or_for_the_server():
    """Recorded from vLLM 0.32 with n-gram speculation: 17 tokens in 14 chunks."""
    events = recorded("vllm")
    out = read("vllm", events, **{DRAFTS: 99.0})
    assert (out.tokens, len(out.ids), out.ids[-1], out.finish) == (17, 17, 2, "stop")
    assert out.steps == 14 == sum(bool(event["choices"]) for event in events)
    assert out.means == {"mean_acceptance_length": (8, 5)}, "1.6, as its own response says"

    for event in events:
        event.pop("metrics", None)
    moved = {DRAFTS: 5.0, ACCEPTED: 3.0}
    assert read("vllm", events, **moved).steps == 14
    assert read("vllm", events, prompt_tokens_total=22.0).steps == 17, "it drafts nothing"
    assert read("vllm", events).steps is None, "nothing is guessed from chunks"
    # of other clients' iterations no more than a token each
    assert read("vllm", events, **moved, iteration_tokens_total_count=500.0).steps == 17
    assert ENGINES["vllm"].body("m", [1], 9)["repetition_penalty"] == 1.0


@pytest.mark.parametrize(
    ("tokens", "accepted", "drafts", "moved", "steps"),
    [
        (10, 9, 3, {}, 4),  # the answer ended at the first of the last step's accepted tokens
        (97, 79, 17, {}, 18),
        (97, 79, 17, {"iteration_tokens_total_count": 22.0}, 22),
    ],
)
def test_tokens_accepted_behind_the_end_take_no_step_away(tokens, accepted, drafts, moved, steps):
    said = {"num_accepted_draft_tokens": accepted, "num_spec_steps": drafts}
    usage = {"prompt_tokens": 4, "completion_tokens": tokens}
    event = {"usage": usage, "metrics": {"speculative_decoding": said}}
    assert read("vllm", [event], **moved).steps == steps


@pytest.mark.parametrize("incremental", [False, True])
def test_sglang_sends_all_ids_or_new_ones_and_counts_verifications(incremental):
    ids = [5, 6, 7, 8, 8, 8, 9]
    events = []
    for begin, end in ((0, 1), (1, 3), (3, 6), (6, 7)):
        said = {"prompt_tokens": 4, "completion_tokens": end, "finish_reason": None}
        new = ids[begin if incremental else 0 : end]
        events.append({"text": "", "output_ids": new, "meta_info": said})
    end = {"type": "stop", "matched": 9}
    said |= {"finish_reason": end, "spec_verify_ct": 3, "spec_accept_length": 7 / 3}
    out = read("sglang", events)
    assert (out.ids, out.steps, out.finish) == (ids, 4, "stop")
    total, count = out.means["spec_accept_length"]
    assert total / count == pytest.approx(7 / 3), "its own counts no step of the first token"


@pytest.mark.parametrize(("more", "steps"), [({}, None), ({"spec_verify_ct": 0}, 3)])
def test_sglang_without_drafts(more, steps):
    said = {"completion_tokens": 3} | more
    assert read("sglang", [{"output_ids": [5, 6, 7], "meta_info": said}]).steps == steps


def test_tensorrt_gives_ids_and_its_server_counts():
    events = [{"choices": [{"text": "", "token_ids": ids}]} for ids in ([5], [6, 7, 8], [9])]
    events[-1]["choices"][0]["avg_decoded_tokens_per_iter"] = 5 / 3
    events.append({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5}})
    out = read("tensorrt", events, **{ACCEPTED: 2.0})
    assert (out.ids, out.steps) == ([5, 6, 7, 8, 9], 3)
    assert out.means["avg_decoded_tokens_per_iter"] == (5, pytest.approx(3))


def test_counters_are_summed_over_their_labels():
    text = '# TYPE a_total counter\na_total{engine="0"} 2.0\na_total{engine="1"} 3\nb_total 4e+01\n'
    assert counted(text) == {"a_total": 5.0, "b_total": 40.0}


@pytest.mark.parametrize(
    ("engine", "pages", "said"),
    [
        ("vllm", {"/version": {"version": "0.32"}, "/metrics": f"vllm:{DRAFTS} 0\n"}, ("speculative", "0.32", 64)),
        ("vllm", {"/metrics": "vllm:prompt_tokens_total 0.0\n"}, ("none", None, 64)),
        ("sglang", {"/server_info": {"speculative_algorithm": "EAGLE", "version": "0.5"}}, ("EAGLE", "0.5", None)),
        ("sglang", {"/get_server_info": {"context_length": 32}}, ("none", None, 32)),
        ("llamacpp", {"/props": {"build_info": "b1"}}, (None, "b1", None)),
        ("tensorrt", {"/prometheus/metrics": "trtllm_spec_decode_x 1.0\n"}, ("speculative", None, 64)),
        ("other", {}, (None, None, 64)),
    ],
)  # fmt: skip
def test_what_servers_say_of_themselves(engine, pages, said):
    found = ENGINES[engine].describe({"id": "m", "max_model_len": 64}, pages.get)
    assert (found["speculation"], found["version"], found["context"]) == said


def test_frames_without_an_answer_are_passed_over(monkeypatch):
    events = [{"choices": [{"text": text, "token_ids": [i]}]} for i, text in enumerate("é\u2028")]
    frames = [": ping", "event: ping\ndata:", "data: {}", "data: null"]
    frames += [f"data: {json.dumps(event)}" for event in events]
    stream = "\n\n".join([*frames, "data: [DONE]", "data: {", ""]).encode()

    def reply(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, json={"data": [{"id": "m"}]})
        return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, content=stream)

    client = partial(httpx2.Client, transport=httpx2.MockTransport(reply))
    monkeypatch.setattr(httpx2, "Client", client)
    out, times = Server("http://here", engine="vllm").ask([1], 9)
    assert (out.ids, out.text, len(times), out.first_tokens) == ([0, 1], "é\u2028", 2, 1)
