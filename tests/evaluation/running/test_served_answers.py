"""Answers of servers without token ids, and numbers of tokens that cannot be."""

import threading
import time

import pytest

from tests.evaluation.running.fake_engine import ONE, choices_in, chunk, served_rows, usage

DRAFTS = {"speculative_decoding": {"num_accepted_draft_tokens": 12, "num_spec_steps": 11}}


@pytest.fixture
def spoken(served, engine):
    """A run whose server gives texts alone, in events of their own the end and number of tokens."""

    def running(text, finish, tokens, *words, metrics=None, **more):
        end = [chunk(finish_reason=finish), {"choices": [], "metrics": metrics}, usage(tokens)]
        engine.owner = "other"
        engine.frames = lambda body: [chunk(text, **more), *end, b"data: [DONE]\n\n"]
        return served(engine, *words)

    return running


@pytest.mark.parametrize(
    ("finish", "more"), [("stop", {}), ("length", {}), ("length", {"token_ids": [7] * 23})]
)
def test_without_all_ids_tokens_and_steps_are_the_engines_and_nothing_is_judged(
    spoken, tmp_path, finish, more
):
    words = ("max_new_tokens=24", "batch=2", "timed=false")
    outcome = spoken(" the answer", finish, 24, *words, metrics=DRAFTS, **more)
    assert outcome.code == 0, outcome.err
    table = served_rows(tmp_path).iloc[0]
    assert (table["mat"], table["new_tokens"]) == (2.0, 24 * 8)
    assert "Not audited: 8 of 8 answers" in outcome.out and "ossless" not in outcome.out
    for choice in choices_in(tmp_path):
        assert choice["output_ids"] == [[]] * len(choice["turns"])
        assert set(choice["turns"]) == {" the answer"}
        assert set(choice["stop"]) == {finish.replace("stop", "eos")}


@pytest.mark.parametrize(
    ("halves", "text", "lost"),
    [(["so \ud83d", "\ude00"], "so \N{GRINNING FACE}", 0), (["so \ud83d"], "so \ufffd", 1)],
)
def test_a_character_may_be_cut_in_two(served, engine, tmp_path, halves, text, lost):
    engine.owner = "other"
    end = [chunk(finish_reason="length"), usage(4), b"data: [DONE]\n\n"]
    engine.frames = lambda body: [*map(chunk, halves), *end]
    outcome = served(engine, "max_new_tokens=4", *ONE)
    assert outcome.code == 0 and (f"{lost} half characters became U+FFFD" in outcome.err) == lost
    assert {turn for choice in choices_in(tmp_path) for turn in choice["turns"]} == {text}


@pytest.mark.parametrize(
    ("text", "tokens", "finish", "more", "line"),
    [
        (" the answer", 0, "length", {}, "gives neither token ids nor their number"),
        ("a", 2, "length", {"token_ids": [7] * 4}, "gives 4 ids of 2 tokens"),
        ("", 5, "length", {"token_ids": [7] * 5}, "gives 5 tokens where 4 were asked for"),
        # and an EOS that is counted
        (" the", 6, "stop", {}, "gives 5 tokens where 4 were asked for"),
        ("", 4, "length", {"token_ids": [7, 2, 7, 7]}, "behind one that is EOS"),
        ("", 4, "length", {"token_ids": [7, 7, 7, 1 << 20]}, "outside the vocabulary"),
        (" the", 1, "length", {}, "stopped after 1 tokens of 4"),
    ],
)
def test_numbers_of_tokens_that_cannot_be(spoken, text, tokens, finish, more, line):
    outcome = spoken(text, finish, tokens, "max_new_tokens=4", *ONE, **more)
    assert outcome.code == 2 and line in outcome.err


def test_answers_of_a_batch_are_those_of_their_questions(served, engine, tmp_path):
    """The first one's is the last to come."""
    second_sent = threading.Event()

    def wait_for_the_second():
        second_sent.wait(60)
        time.sleep(0.1)  # until it is read as well

    def frames(body):
        if "question 1" in body["prompt"]:
            return [wait_for_the_second, chunk(" the", "stop"), usage(1)]
        return [chunk(" answer", "stop"), usage(1), second_sent.set]

    engine.owner = "other"
    engine.frames = frames
    assert served(engine, "batch=2", "bench.begin=1", "bench.end=3", "timed=false").code == 0
    assert [choice["turns"] for choice in choices_in(tmp_path)] == [[" the"], [" answer"]]
