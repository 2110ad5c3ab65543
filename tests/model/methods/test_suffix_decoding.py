"""SuffixDecoding against the public code's own trace, and its kept state.

suffix_decoding_trace.jsonl: one line a turn, start and mode, of the 56 first turns of the sample bench (their prompts
and outputs are those of ../recycling/official_trace.jsonl up to EOS), recorded from the C++ trees and the cache of
github.com/snowflakedb/ArcticInference (commit 9d46438) at their defaults, drafting after the first token as vLLM does.
A character a step: the accepted length and the tokens drafted to the base 36, the trie (l: the request's, g: the
answers', -: no draft). `scores`: the CRC-32 of the steps' scores, float32. suffix_decoding_drafts.jsonl: the drafts of
three turns, in the order in which they were drafted.
"""

import json
import random
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from model.engine.rule.verification import accepted_nodes
from model.methods.copying.suffix_decoding import SuffixDecoding
from tests.model.methods.public_traces import EOS, TRACE
from tests.model.sessions import comparable

V = 61
HERE = Path(__file__).parent
TURNS = [turn for turn in TRACE if turn["start"] == "cold"]
WAYS = pytest.mark.parametrize("mode", ["chain", "tree"])
STARTS = pytest.mark.parametrize("start", ["cold", "hot"])


def by_turn(name):
    lines = [json.loads(line) for line in (HERE / name).read_text().splitlines()]
    return {(line["start"], line["mode"], line["turn"]): line for line in lines}


RECORDED = by_turn("suffix_decoding_trace.jsonl")
DRAFTS = by_turn("suffix_decoding_drafts.jsonl")


def answer_of(turn):
    ids = turn["output_ids"]
    return ids[: ids.index(EOS)] + [EOS] if EOS in ids else [*ids, EOS]


def replayed(drafter, prompt, answer):
    """The steps of a session whose target gives this answer: accepted length, source, what was looked up."""
    session = drafter.session()
    at = 1
    session.begin(prompt)
    session.observe(SimpleNamespace(tokens=answer[:1]))
    while at < len(answer):
        source, looked_up = session.look_up()
        draft = session.draft(answer[at - 1])
        tree = draft.tree
        tokens = draft.tokens.tolist()
        assert tokens[0] == answer[at - 1] and draft.source == (source if len(tree) > 1 else None)
        assert sorted(tokens[1:]) == sorted(looked_up.tokens) and len(tree) <= drafter.max_nodes
        choices = [
            answer[at + depth] if at + depth < len(answer) else -1 for depth in tree.depth_of
        ]
        _, node = accepted_nodes(tree, tokens, choices)
        new = answer[at : at + tree.depth_of[node] + 1]
        yield len(new), source, looked_up
        session.observe(SimpleNamespace(tokens=new))
        at += len(new)


def totals(start, **settings):
    """Steps and drafted tokens of all turns."""
    drafter = SuffixDecoding(2048, **settings)
    steps = 0
    drafted = 0
    for turn in TURNS:
        if start == "cold":
            drafter.reset()
        for _, _, looked_up in replayed(drafter, turn["prompt_ids"], answer_of(turn)):
            steps, drafted = steps + 1, drafted + len(looked_up.tokens)
    return steps, drafted


@WAYS
@STARTS
def test_every_step_of_every_turn_is_the_public_codes(start, mode):
    drafter = SuffixDecoding(2048, branches=mode == "tree")
    total = 0
    compared = 0
    for number, turn in enumerate(TURNS, 1):
        recorded = RECORDED[start, mode, number]
        if start == "cold":
            drafter.reset()
        lengths, *looked_up = zip(
            *replayed(drafter, turn["prompt_ids"], answer_of(turn)), strict=True
        )
        drafts = looked_up[1]
        assert lengths == tuple(int(length, 36) for length in recorded["accepted"])
        assert [len(draft.tokens) for draft in drafts] == [
            int(count, 36) for count in recorded["drafted"]
        ]
        letters = [
            "lg"[source == "answers"] if draft.tokens else "-"
            for source, draft in zip(*looked_up, strict=True)
        ]
        assert "".join(letters) == recorded["sources"]
        assert (
            zlib.crc32(np.array([draft.score for draft in drafts], dtype="<f4").tobytes())
            == recorded["scores"]
        )
        expected = DRAFTS.get((start, mode, number), {"drafts": []})["drafts"]
        for draft, (tokens, parents, probs) in zip(drafts, expected, strict=False):
            assert (draft.tokens, draft.parents) == (tokens, parents)
            assert np.array_equal(draft.probs, np.array(probs, dtype=np.float32))
            compared += 1
        total += len(lengths)
    assert (
        total
        == {"cold": {"chain": 2956, "tree": 2955}, "hot": {"chain": 2217, "tree": 2214}}[start][
            mode
        ]
    )
    assert compared == (61 if start == "cold" else 105)


TOTALS = [  # steps and drafted tokens
    (dict(start="hot", depth=24, nodes=24, branches=True), 2214, 4998),
    (dict(start="hot", factor=4, offset=8, branches=True), 1849, 22593),
    (dict(start="hot", cached_answers=8, branches=True), 2264, 4957),
]


@pytest.mark.parametrize(("settings", "steps", "drafted"), TOTALS)
def test_other_settings_take_the_public_codes_steps(settings, steps, drafted):
    assert totals(**settings) == (steps, drafted)


def test_the_oldest_answers_are_forgotten_and_a_saved_state_goes_on_exactly():
    """Even a running answer may be forgotten."""
    rng = random.Random(0)
    drafter = SuffixDecoding(V, cached_answers=3)
    texts = [[rng.randrange(4) for _ in range(rng.randrange(1, 30))] for _ in range(40)]
    running = drafter.session()
    running.begin([5])
    for text in texts:
        other = SuffixDecoding(V, cached_answers=3)
        other.load_state_dict(drafter.state_dict())
        steps = [list(replayed(method, [5, 6], text)) for method in (drafter, other)]
        assert steps[0] == steps[1] and comparable(drafter.state_dict()) == comparable(
            other.state_dict()
        )
    running.observe(SimpleNamespace(tokens=[3]))
    kept = [text.tokens for text in drafter.answers.texts]
    assert kept == texts[-3:]


def test_answers_that_run_at_once_see_each_other_and_a_reset_parts_them():
    drafter = SuffixDecoding(V)
    first = drafter.session()
    second = drafter.session()
    first.begin([50])
    second.begin([51])
    first.observe(SimpleNamespace(tokens=[7, 8, 9]))
    second.observe(SimpleNamespace(tokens=[7, 8]))
    assert second.look_up()[1].tokens == [9] and second.look_up()[0] == "answers"
    drafter.reset()
    drafter.session().begin([52])  # whose number the first one's was
    for session in (first, second):
        session.observe(SimpleNamespace(tokens=[9]))
    assert [text.tokens for text in drafter.answers.texts] == [[]]
