"""Answers of servers: ids made of texts, parts outside of them, ends, and how many tokens and seconds they are."""

import pytest
from transformers import AutoTokenizer

from tests.evaluation.running.fake_engine import ONE, choices_in, chunk, served_rows, usage

DRAFTS = {"speculative_decoding": {"num_accepted_draft_tokens": 12, "num_spec_steps": 11}}


@pytest.fixture
def spoken(served, engine):
    """A run whose server gives texts alone, in events of their own the end and number of tokens."""

    def running(text, finish, tokens, *words, metrics=None, name="served", **more):
        parts = [chunk(piece, **more) for piece in ([text] if isinstance(text, str) else text)]
        end = [chunk(finish_reason=finish), {"choices": [], "metrics": metrics}, usage(tokens)]
        engine.owner = "other"
        engine.frames = lambda body: [*parts, *end, b"data: [DONE]\n\n"]
        return served(engine, *words, name=name)

    return running


MADE = {
    "an answer begins as the text before it ends": ("(the answer", "length", 4),
    "with a space": (" the answer", "length", 2),
    "left out by the server": ("the answer", "length", 2),
    "none is there": ("the answer", "length", 3),
    "left out, and EOS is counted": ("the answer", "stop", 3),
    "special words are words": (" the </s> answer", "length", 7),
    "EOS is not counted": (" the answer", "stop", 2),
    "no number is given": (" the answer", "stop", 0),
}


@pytest.mark.parametrize("case", MADE)
def test_ids_are_made_of_text_and_prompt_together(spoken, checkpoint, tmp_path, case):
    """With a SentencePiece tokenizer an answer without a space had a token too many."""
    text, finish, tokens = MADE[case]
    limit = tokens if finish == "length" else 16
    outcome = spoken(text, finish, tokens, *ONE, f"max_new_tokens={limit}")
    assert outcome.code == 0, outcome.err
    (choice,) = choices_in(tmp_path)
    (ids,) = choice["output_ids"]
    stopped = finish == "stop"
    assert len(ids) == (3 if stopped else tokens) and (ids[-1] == 2) is stopped
    assert 2 not in ids[:-1] and 1 not in ids and choice["turns"] == [text]
    assert choice["new_tokens"] == choice["decoding_steps"] == [len(ids)]
    assert choice["ids_remade"] == [True]

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    before = tokenizer("ASSISTANT:", add_special_tokens=False).input_ids
    read = tokenizer.decode(before + ids, skip_special_tokens=True)
    assert read.endswith(f"ASSISTANT:{text}") is not case.startswith("left out")


@pytest.mark.parametrize(
    ("text", "finish", "more"),
    [
        (" the answer", "stop", {}),
        (" the answer\ufffd", "length", {}),  # cut inside a character
        (" the answer", "stop", {"reasoning": "so"}),
        ("", "length", {"delta": {"content": " the answer"}}),
    ],
)
def test_without_ids_tokens_and_steps_are_the_engines_and_nothing_is_judged(
    spoken, tmp_path, text, finish, more
):
    """MAT had mixed the ids made of a text with the engine's drafts."""
    words = ("max_new_tokens=24", "batch=2", "timed=false")
    outcome = spoken(list(text) or [""], finish, 24, *words, metrics=DRAFTS, **more)
    assert outcome.code == 0, outcome.err
    table = served_rows(tmp_path).iloc[0]
    assert (table["mat"], table["new_tokens"]) == (2.0, 24 * 8)
    assert "Not audited: 8 of 8 answers" in outcome.out and "ossless" not in outcome.out
    for choice in choices_in(tmp_path):
        assert choice["output_ids"] == [[]] * len(choice["turns"])
        assert set(choice["stop"]) == {finish.replace("stop", "eos")}


@pytest.mark.parametrize(
    ("text", "tokens", "finish", "more", "line"),
    [
        (" the answer\ufffd", 0, "length", {}, "gives no number of tokens, and no text"),
        (" the answer", 0, "length", {"reasoning": "so"}, "gives no number of tokens, and no text"),
        ("a", 2, "length", {"token_ids": [7] * 4}, "gives 4 ids of 2 tokens"),
        ("", 5, "length", {"token_ids": [7] * 5}, "gives 5 tokens where 4 were asked for"),
        (" the answer the answer the", 5, "length", {}, "gives 5 tokens where 4 were asked for"),
        # and an EOS that is counted
        (" the\ufffd", 6, "stop", {}, "gives 5 tokens where 4 were asked for"),
        (" the", 1, "length", {}, "stopped after 1 tokens of 4"),
    ],
)
def test_numbers_of_tokens_that_cannot_be(spoken, text, tokens, finish, more, line):
    outcome = spoken(text, finish, tokens, "max_new_tokens=4", *ONE, **more)
    assert outcome.code == 2 and line in outcome.err


def test_answers_of_a_batch_are_those_of_their_questions(served, engine, tmp_path):
    """The first one's is the last to come."""

    def frames(body):
        first = "question 1" in body["prompt"]
        text = chunk(" the" if first else " answer", "stop")
        return [0.3 * first, text, usage(1)]

    engine.owner = "other"
    engine.frames = frames
    assert served(engine, "batch=2", "bench.begin=1", "bench.end=3", "timed=false").code == 0
    assert [choice["turns"] for choice in choices_in(tmp_path)] == [[" the"], [" answer"]]
