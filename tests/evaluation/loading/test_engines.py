"""What engines say, and what is made of it: streams recorded from llama.cpp and vLLM, others made from their code."""

import json
import random
import re
from functools import partial
from pathlib import Path

import httpx2
import pytest

from evaluation.loading.engines import ENGINES, Reply, counted
from evaluation.loading.server import Server
from model.errors import UserError

STREAMS = Path(__file__).with_name("streams")


def heard(engine: str, events: list[dict], moved: dict[str, float] | None = None) -> Reply:
    out = Reply()
    for event in events:
        ENGINES[engine].read(event, out)
    ENGINES[engine].count(moved or {}, out)
    return out


def recorded(name: str) -> list[dict]:
    lines = (
        line.removeprefix("data: ") for line in (STREAMS / f"{name}.sse").read_text().splitlines()
    )
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_llama_cpp_counted_one_draft_of_16_tokens_in_64_forwards():
    """Recorded from its server with ngram-map-k; its n_decode_total rose by 64 meanwhile."""
    moved = {
        "llamacpp:spec_decode_num_drafts_total": 1.0,
        "llamacpp:spec_decode_num_accepted_tokens_total": 16.0,
    }
    out = heard("llamacpp", recorded("llamacpp"), moved)
    assert (out.tokens, len(out.ids), out.steps, out.finish) == (80, 80, 64, "length")
    assert out.means == {"mean_len": (17, 1)}, (
        "1 + 16 accepted over the one step that had a draft: no MAT"
    )
    assert (
        out.ids[:3] == [19556, 28, 33662]
        and out.text.startswith("Hello, hello")
        and out.prompt_tokens == 37
    )
    assert out.speculation == "ngram-map-k"
    without = heard("llamacpp", recorded("llamacpp"))
    assert without.steps == 64 and not without.means, (
        "without --metrics it does not say in how many steps it drafted"
    )


def test_llama_cpp_streams_no_id_inside_a_character():
    """Recorded from its server: an emoji is three tokens, of which the stream has the last; the end has none."""
    out = heard("llamacpp", recorded("llamacpp_emoji"))
    assert (len(out.ids), out.tokens, out.text) == (
        8,
        24,
        " 😊🎉" + 6 * "🐍",
    ) and out.stopped_by is None


def test_vllm_counts_drafts_by_answer_or_for_the_server():
    """Recorded from vLLM 0.32 with n-gram speculation: 17 tokens in 14 chunks, of which none was merged."""
    events = recorded("vllm")
    out = heard("vllm", events, {"vllm:spec_decode_num_drafts_total": 99.0})
    assert (out.tokens, len(out.ids), out.ids[-1], out.steps) == (
        17,
        17,
        2,
        14,
    ) and out.finish == "stop"
    assert out.steps == sum(bool(event["choices"]) for event in events)
    assert out.means == {"mean_acceptance_length": (8, 5)}, "1.6, as its own response says"
    for event in events:
        event.pop("metrics", None)
    moved = {
        "vllm:spec_decode_num_drafts_total": 5.0,
        "vllm:spec_decode_num_accepted_tokens_total": 3.0,
    }
    assert heard("vllm", events, moved).steps == 14
    assert heard("vllm", events, {"vllm:prompt_tokens_total": 22.0}).steps == 17, (
        "it has no counters of drafts"
    )
    assert heard("vllm", events).steps is None, "and nothing is guessed from chunks"
    assert heard("vllm", events, {"python_gc_total": 1.0}).steps is None, (
        "nor from others', with --disable-log-stats"
    )
    moved["vllm:iteration_tokens_total_count"] = 500.0
    assert heard("vllm", events, moved).steps == 17, (
        "of other clients' iterations no more than a token each"
    )
    assert ENGINES["vllm"].body("m", [1], 9)["repetition_penalty"] == 1.0, (
        "and not the checkpoint's"
    )


def test_tokens_accepted_behind_the_end_take_no_step_away():
    """EAGLE drafts in each step: of the last one's 3 accepted tokens the answer ended at the first."""
    metrics = {"num_accepted_draft_tokens": 3 + 3 + 3, "num_spec_steps": 3}
    usage = {"prompt_tokens": 4, "completion_tokens": 1 + 4 + 4 + 1}
    event = {"choices": [], "usage": usage, "metrics": {"speculative_decoding": metrics}}
    assert heard("vllm", [event]).steps == 4, "and not 1 + (9 - 9)"


def test_vllm_accepts_tokens_behind_the_limit_which_its_count_of_iterations_shows():
    """Read from vLLM 0.32 with n-gram speculation of 5: 97 tokens came in 22 chunks, and in no 97 - 79 steps."""
    metrics = {"num_accepted_draft_tokens": 79, "num_spec_steps": 17}
    usage = {"prompt_tokens": 37, "completion_tokens": 97}
    event = {"choices": [], "usage": usage, "metrics": {"speculative_decoding": metrics}}
    assert heard("vllm", [event], {"vllm:iteration_tokens_total_count": 22.0}).steps == 22
    assert heard("vllm", [event]).steps == 18, "too few, where there is nothing but drafts to count"


@pytest.mark.parametrize("incremental", [False, True])
def test_sglang_sends_all_ids_or_new_ones_and_counts_verifications(incremental):
    ids, events = [5, 6, 7, 8, 8, 8, 9], []
    for begin, end in ((0, 1), (1, 3), (3, 6), (6, 7)):
        meta = {"prompt_tokens": 4, "completion_tokens": end, "finish_reason": None}
        if end == 7:
            meta |= {"finish_reason": {"type": "stop", "matched": 9}, "spec_verify_ct": 3}
            meta |= {
                "spec_accept_length": 7 / 3,
                "spec_num_correct_drafts": 3,
                "spec_accepted_drafts": 3,
            }
        events.append(
            {"text": "", "output_ids": ids[begin if incremental else 0 : end], "meta_info": meta}
        )
    out = heard("sglang", events)
    assert (out.ids, out.steps, out.finish) == (ids, 4, "stop")
    total, count = out.means["spec_accept_length"]
    assert total / count == pytest.approx(7 / 3), (
        "its own figure counts the first token and not its step: MAT is 7/4"
    )


@pytest.mark.parametrize(
    ("more", "steps"), [({}, None), ({"spec_verify_ct": 0}, 3), ({"spec_verify_ct": 1}, 2)]
)
def test_sglang_without_drafts_or_without_its_mean(more, steps):
    """No verification at all had been one step, and a mean that was not reported 0."""
    meta = {"prompt_tokens": 4, "completion_tokens": 3, "finish_reason": {"type": "length"}} | more
    out = heard("sglang", [{"text": "", "output_ids": [5, 6, 7], "meta_info": meta}])
    assert (out.steps, out.means) == (steps, {})


def test_tensorrt_gives_ids_and_its_server_counts():
    chunks = [[5], [6, 7, 8], [9]]
    events = [
        {
            "choices": [
                {
                    "index": 0,
                    "text": "",
                    "token_ids": ids,
                    "finish_reason": "stop" if ids == [9] else None,
                }
            ]
        }
        for ids in chunks
    ]
    events[-1]["choices"][0]["avg_decoded_tokens_per_iter"] = 5 / 3
    events.append({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5}})
    before = (
        'trtllm_spec_decode_num_accepted_tokens_total{model_name="a",engine_type="pytorch"} 40.0\n'
    )
    after = before.replace("40.0", "4.2e+01")
    moved = {name: value - counted(before)[name] for name, value in counted(after).items()}
    out = heard("tensorrt", events, moved)
    assert (out.ids, out.steps) == ([5, 6, 7, 8, 9], 3)
    total, count = out.means["avg_decoded_tokens_per_iter"]
    assert (total, count) == (5, pytest.approx(3))
    body = ENGINES["tensorrt"].body("m", [1, 2], 9)
    assert body["detokenize"] is False and "return_token_ids" not in body, (
        "it refuses fields that it does not know"
    )


def test_counters_are_summed_over_their_labels():
    text = '# HELP a_total A.\n# TYPE a_total counter\na_total{engine="0"} 2.0\na_total{engine="1"} 3\nb_total 4\n'
    assert counted(text) == {"a_total": 5.0, "b_total": 4.0} and counted(None) == {}


@pytest.mark.parametrize(
    "engine, paths, speculation, version, context",
    [
        (
            "vllm",
            {"/version": {"version": "0.32"}, "/metrics": "vllm:spec_decode_num_drafts_total 0\n"},
            "speculative",
            "0.32",
            64,
        ),
        ("vllm", {"/metrics": "vllm:prompt_tokens_total 0.0\n"}, "none", None, 64),
        ("vllm", {}, None, None, 64),
        ("vllm", {"/metrics": "python_gc_total 0.0\n"}, None, None, 64),
        (
            "sglang",
            {"/server_info": {"speculative_algorithm": "EAGLE", "version": "0.5.12"}},
            "EAGLE",
            "0.5.12",
            None,
        ),
        (
            "sglang",
            {"/get_server_info": {"speculative_algorithm": None, "context_length": 32}},
            "none",
            None,
            32,
        ),
        (
            "llamacpp",
            {"/props": {"build_info": "b1", "speculative.types": "none"}},
            None,
            "b1",
            None,
        ),
        (
            "tensorrt",
            {"/prometheus/metrics": "trtllm_spec_decode_acceptance_length 1.0\n"},
            "speculative",
            None,
            64,
        ),
        ("other", {}, None, None, 64),
    ],
)
def test_what_servers_say_of_themselves(engine, paths, speculation, version, context):
    said = ENGINES[engine].describe({"id": "m", "max_model_len": 64}, paths.get)
    assert said == {"version": version, "speculation": speculation, "context": context}


PARTS = (
    "",
    "data: x",
    "\n\n",
    "[DONE]",
    "é\u2028\x85",
    " 😊",
    '{"a":1}',
    "</s>",
    "\ufffd",
    "id: 3",
)
EMPTY = (
    b"event: ping",
    b"data:",
    b"data: ",
    b"id: 7",
    b"retry: 10",
    b": ping",
    b"event: ping\ndata: {}",
    b"data: null",
)


def made_stream(rng: random.Random, engine: str) -> bytes:
    """A stream as servers write it: of any line ends and frames, perhaps cut, or with parts outside the text."""
    ids = [rng.randrange(99) for _ in range(rng.randrange(9))]
    texts = [rng.choice(PARTS) for _ in ids]
    finish, usage = (
        rng.choice(("stop", "length", None)),
        {"prompt_tokens": 4, "completion_tokens": len(ids)},
    )
    events, begin = [], 0
    while begin < len(ids):
        end = min(begin + rng.randrange(1, 4), len(ids))
        last, text = (
            finish if end == len(ids) and rng.random() < 0.5 else None,
            "".join(texts[begin:end]),
        )
        if engine == "llamacpp":
            events.append({"content": text, "tokens": ids[begin:end]})
        elif engine == "sglang":
            meta = {
                "prompt_tokens": 4,
                "completion_tokens": end,
                "finish_reason": last and {"type": last},
            }
            events.append(
                {"text": "".join(texts[:end]), "output_ids": ids[:end], "meta_info": meta}
            )
        else:
            choice = {"text": text, "finish_reason": last} | (
                {"token_ids": ids[begin:end]} if engine == "vllm" else {}
            )
            key, value = (
                rng.choice(
                    ("reasoning", "refusal", "tool_calls", "delta", "x9", "logprobs", "index")
                ),
                None,
            )
            value = (
                rng.choice((None, "", [], {}, "so", [1], {"a": 1}, 3))
                if rng.random() < 0.3
                else None
            )
            events.append({"choices": [choice | {key: value}]})
        begin = end
    if engine == "llamacpp":
        end = {
            "stop": True,
            "stop_type": "eos" if finish == "stop" else "limit",
            "timings": {},
            "content": "",
        }
        end |= {"tokens_predicted": len(ids), "tokens_evaluated": 4, "generation_settings": {}}
        events += [end] if finish else []
    elif engine != "sglang":
        events += [
            {"choices": [{"text": "", "finish_reason": finish}]},
            {"choices": [], "usage": usage},
        ]
    if rng.random() < 0.1:
        events.insert(
            rng.randrange(len(events) + 1),
            {"error": rng.choice(({"message": "no room"}, "no room"))},
        )
    frames = []
    for event in events:
        frames += [rng.choice(EMPTY) for _ in range(rng.randrange(3))]
        data = json.dumps(
            event, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1))
        )
        frames.append(
            "\n".join(f"data:{rng.choice((' ', ''))}{line}" for line in data.split("\n")).encode()
        )
    frames += [b"data: [DONE]", b"data: {"] if rng.random() < 0.7 else []
    end = rng.choice((b"\n", b"\r\n", b"\r"))
    stream = b"".join(frame.replace(b"\n", end) + 2 * end for frame in frames)
    # of half a line end, httpx2 makes two
    cut = stream[: rng.randrange(len(stream) + 1)].rstrip(b"\r")
    return cut if rng.random() < 0.2 else stream


def reference(stream: bytes, engine: str) -> dict:
    """What a stream says, read as the standard describes it: the whole text, its lines, its events, then their keys."""
    lines, data, events = re.split("\r\n|\n|\r", stream.decode(errors="replace"))[:-1], [], []
    for line in lines:
        if line == "":
            events, data = [*events, "\n".join(data)], []
        elif line.split(":")[0] == "data":
            data.append(line.partition(":")[2].removeprefix(" "))
    said = {
        "ids": [],
        "text": "",
        "finish": "",
        "tokens": 0,
        "prompt_tokens": None,
        "parts": 0,
        "times": 0,
    }
    for event in events:
        if event.strip() == "[DONE]":
            break
        event = json.loads(event) if event.strip() else None
        if not event:
            continue
        if "error" in event:
            return {"error": True}
        before = json.dumps([said[key] for key in ("ids", "text", "finish", "parts")])
        if engine == "llamacpp":
            said["ids"] += event.get("tokens", [])
            said["text"] += event["content"]
            if "stop" in event:
                said |= {"finish": "stop" if event["stop_type"] == "eos" else "length"}
                said |= {"tokens": event["tokens_predicted"], "prompt_tokens": 4}
        elif engine == "sglang":
            said |= {
                "ids": event["output_ids"],
                "text": event["text"] or said["text"],
                "prompt_tokens": 4,
            }
            said["tokens"] = event["meta_info"]["completion_tokens"]
            said["finish"] = (event["meta_info"]["finish_reason"] or {"type": ""})["type"]
        for choice in event.get("choices", []):
            said["ids"] += choice.pop("token_ids", [])
            said["text"] += choice.pop("text")
            said["finish"] = choice.pop("finish_reason") or said["finish"]
            parts = [
                key
                for key, value in choice.items()
                if key not in ("logprobs", "index") and value not in (3, None)
            ]
            said["parts"] += any(choice[key] for key in parts)
        if "usage" in event:
            said |= {"tokens": event["usage"]["completion_tokens"], "prompt_tokens": 4}
        said["times"] += before != json.dumps(
            [said[key] for key in ("ids", "text", "finish", "parts")]
        )
    return said | {"times": max(said["times"], 1)}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "other"])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_stream_is_read_as_the_standard_describes_it(monkeypatch, engine, seed):
    rng, sent, seen = random.Random(f"{seed} {engine}"), {}, set()

    def reply(request):
        if request.method == "GET":
            return httpx2.Response(200, json={"data": [{"id": "m"}]})
        return httpx2.Response(
            200, headers={"Content-Type": "text/event-stream"}, content=iter(sent["parts"])
        )

    monkeypatch.setattr(
        httpx2, "Client", partial(httpx2.Client, transport=httpx2.MockTransport(reply))
    )
    server = Server("http://here", engine=engine)
    for number in range(300):
        stream = made_stream(rng, engine)
        cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randrange(8)))
        sent["parts"] = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        expected = reference(stream, engine)
        try:
            heard, times = server.ask([1], 9)
        except UserError as error:
            assert "no room" in str(error) and expected == {"error": True}, (seed, number, stream)
            seen.add("error")
            continue
        found = {key: getattr(heard, key) for key in expected if key != "times"} | {
            "times": len(times)
        }
        assert found == expected, (seed, number, stream)
        seen |= {key for key, value in found.items() if value} | {found["finish"]}
    assert {
        "error",
        "ids" if engine != "other" else "parts",
        "text",
        "tokens",
        "stop",
        "length",
        "",
    } <= seen
