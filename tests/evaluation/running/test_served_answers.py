"""Answers of servers: ids made of texts, parts outside of them, ends, and how many tokens and seconds they are."""

import json

import pandas as pd
import pytest
from transformers import AutoTokenizer

from tests.evaluation.conftest import answers_in
from tests.evaluation.running.fake_engine import ONE, served_rows


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
    return [
        choice for answer in answers_in(tmp_path / "results" / name) for choice in answer["choices"]
    ]


MADE = [
    ("an answer begins as the text before it ends", "(the answer", "length", 4),
    ("with a space", " the answer", "length", 2),
    ("left out by the server", "the answer", "length", 2),
    ("none is there", "the answer", "length", 3),
    ("left out, and of one number with and without it", "one is", "length", 2),
    ("left out, and EOS is counted", "the answer", "stop", 3),
    ("special words are words", " the </s> answer", "length", 7),
    ("EOS is counted", " the answer", "stop", 3),
    ("EOS is not counted", " the answer", "stop", 2),
    ("no number is given", " the answer", "stop", 0),
]


LEFT_OUT = [case for name, *case in MADE if name.startswith("left out")]


@pytest.mark.parametrize(
    ("text", "finish", "tokens"), [case[1:] for case in MADE], ids=[case[0] for case in MADE]
)
def test_ids_are_made_of_text_and_prompt_together(
    served, engine, checkpoint, tmp_path, text, finish, tokens
):
    """With a SentencePiece tokenizer an answer that began with no space had a token too many, and `</s>` was EOS."""
    engine.owner, engine.frames = "other", spoken([text], finish, tokens)
    outcome = served(engine, *ONE, f"max_new_tokens={tokens if finish == 'length' else 16}")
    assert outcome.code == 0, outcome.err
    (choice,) = choices_in(tmp_path)
    (ids,), tokenizer = choice["output_ids"], AutoTokenizer.from_pretrained(checkpoint)
    assert len(ids) == (tokens or 3) + (finish == "stop" and tokens == 2) and (ids[-1] == 2) is (
        finish == "stop"
    )
    assert 2 not in ids[:-1] and 1 not in ids and choice["turns"] == [text]
    before = tokenizer("ASSISTANT:", add_special_tokens=False).input_ids
    assert tokenizer.decode(before + ids, skip_special_tokens=True).endswith(
        f"ASSISTANT:{text}"
    ) is ([text, finish, tokens] not in LEFT_OUT)
    assert choice["new_tokens"] == choice["decoding_steps"] == [len(ids)] and choice[
        "ids_remade"
    ] == [True]


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
    table = served_rows(tmp_path).iloc[0]
    assert (table["mat"], table["new_tokens"]) == (2.0, 24 * 8)
    assert "Not audited: 8 of 8 answers" in outcome.out and "ossless" not in outcome.out
    assert all(
        choice["output_ids"] == [[]] * len(choice["turns"]) for choice in choices_in(tmp_path)
    )
    assert {stop for choice in choices_in(tmp_path) for stop in choice["stop"]} == {
        finish.replace("stop", "eos")
    }
    header = (tmp_path / "results/served/tables/main.csv").read_text().splitlines()[0]
    assert "" not in header.split(","), (
        "drafts of an engine without a name for its mean had made a column without one"
    )


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (" the answer\ufffd", {}),
        (" the answer", {"reasoning": "so"}),
        ("", {"content": " the answer"}),
    ],
)
def test_text_without_a_number_of_tokens_has_to_show_all(served, engine, text, more):
    engine.owner, engine.frames = "other", spoken([text], "length", 0, **more)
    outcome = served(engine, *ONE)
    assert (
        outcome.code == 2
        and "gives no number of tokens, and no text that shows all of them" in outcome.err
    )


@pytest.mark.parametrize(
    ("text", "count", "tokens", "finish", "line"),
    [
        ("a", 4, 2, "length", "gives 4 ids of 2 tokens"),
        # 5 tokens' time was that of 4
        (
            "",
            5,
            5,
            "length",
            "gives 5 tokens where 4 were asked for",
        ),
        ("", 5, 0, "stop", "gives 5 tokens where 4 were asked for"),
        (" the answer the answer the", 0, 5, "length", "gives 5 tokens where 4 were asked for"),
        (
            " the answer the answer the",
            0,
            0,
            "stop",
            "gives no number of tokens, and no text that shows",
        ),
        # and an EOS that is counted
        (
            " the\ufffd",
            0,
            6,
            "stop",
            "gives 5 tokens where 4 were asked for",
        ),
    ],
)
def test_more_tokens_than_are_counted_or_asked_for_are_an_error(
    served, engine, text, count, tokens, finish, line
):
    usage = frame({"choices": [], "usage": {"prompt_tokens": None, "completion_tokens": tokens}})
    choice = {"text": text, "finish_reason": finish} | ({"token_ids": [7] * count} if count else {})
    engine.owner = "vllm" if count else "other"
    engine.frames = lambda body: [(0.0, frame({"choices": [choice]}) + usage)]
    outcome = served(engine, "max_new_tokens=4", *ONE)
    assert outcome.code == 2 and line in outcome.err


def test_drafts_without_a_number_of_tokens_give_no_steps(served, engine, tmp_path):
    """They are counted with the engine's ids: ids made of the text had had a MAT of their own."""
    drafts = {
        "choices": [],
        "metrics": {"speculative_decoding": {"num_accepted_draft_tokens": 2, "num_spec_steps": 1}},
    }
    *parts, end = spoken([" the answer the answer"], "length", 0)(None)
    engine.owner, engine.frames = "other", lambda body: [*parts, (0.0, frame(drafts)), end]
    assert served(engine, *ONE[:1], "timed=false", "max_new_tokens=4").code == 0
    (choice,) = choices_in(tmp_path)
    assert (
        choice["decoding_steps"] == [None]
        and choice["new_tokens"] == [4]
        and choice["ids_remade"] == [True]
    )
    assert pd.isna(served_rows(tmp_path)["mat"].item())


def test_a_part_outside_the_text_takes_time_from_its_first_event_on(served, engine, tmp_path):
    """All of the reasoning had been a part of the prefill."""

    def frames(body):
        for wait in (0.0, 0.3):
            yield (
                wait,
                frame(
                    {
                        "choices": [
                            {"index": 0, "text": "", "reasoning": "so", "finish_reason": None}
                        ]
                    }
                ),
            )
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
    for choice in choices:
        (first, *later), (prefill,), (decode,) = (
            *choice["step_us"],
            choice["prefill_time"],
            choice["decode_time"],
        )
        assert len(later) == 3 and later[-1] >= 3e5
        assert decode / sum(later) == pytest.approx(prefill / first, rel=0.01), "one share for both"


def test_answers_of_a_batch_are_those_of_their_questions(served, engine, tmp_path):
    """The first one's is the last to come."""

    def frames(body):
        first = "question 1" in body["prompt"]
        return spoken([" the" if first else " answer"], "stop", 1, last=0.3 * first)(body)

    engine.owner, engine.frames = "other", frames
    assert served(engine, "batch=2", "bench.begin=1", "bench.end=3", "timed=false").code == 0
    assert [choice["turns"] for choice in choices_in(tmp_path)] == [[" the"], [" answer"]]


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
        yield (
            0.0,
            frame({"choices": [{"text": "", "token_ids": [7, 8, last], "finish_reason": None}]})
            + ending,
        )

    engine.frames = frames
    assert served(engine, "max_new_tokens=3", *ONE).code == 0
    assert choices_in(tmp_path)[0]["stop"] == ["eos" if last == 2 else "length"]
    outcome = served(engine, "max_new_tokens=4", *ONE, name="more")
    assert outcome.code == (0 if last == 2 else 2) and ("the stream broke off" in outcome.err) is (
        last == 7
    )


def test_a_text_up_to_the_limit_without_a_reason(served, engine, tmp_path):
    engine.owner, engine.frames = "other", spoken([" the answer"], None, 2)
    assert served(engine, "max_new_tokens=2", *ONE).code == 0
    assert choices_in(tmp_path)[0]["stop"] == ["length"]
    outcome = served(engine, "max_new_tokens=3", *ONE, name="more")
    assert outcome.code == 2 and "the stream broke off" in outcome.err
