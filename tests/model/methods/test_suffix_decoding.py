"""SuffixDecoding against the public code's own trace, its trie against a plain one, by hand, and its kept state.

suffix_decoding_trace.jsonl: one line a turn, start and mode, of the 56 first turns of the sample bench (their prompts
and outputs are those of ../recycling/official_trace.jsonl up to EOS), recorded from the C++ trees and the cache of
github.com/snowflakedb/ArcticInference (commit 9d46438) at their defaults, drafting after the first token as vLLM does.
A character a step: the accepted length and the tokens drafted to the base 36, the trie (l: the request's, g: the
answers', -: no draft). `scores`: the CRC-32 of the steps' scores, float32. suffix_decoding_drafts.jsonl: the drafts of
three turns, in the order in which they were drafted.
"""

import json
import random
import tracemalloc
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.engine import Target, generate
from model.engine.verification import accepted_nodes
from model.errors import UserError
from model.methods.suffix_decoding import SuffixDecoding
from model.structures.suffix_trie import GrowingText, Limits, SuffixTrie, _chain, _tree
from tests.conftest import toy_model
from tests.model.methods.public_traces import EOS, TRACE, embedded
from tests.model.sessions import comparable

V = 61
HERE = Path(__file__).parent
TURNS = [turn for turn in TRACE if turn["start"] == "cold"]
WAYS = pytest.mark.parametrize("mode", ["chain", "tree"])
STARTS = pytest.mark.parametrize("start", ["cold", "hot"])


def by_turn(name):
    lines = [json.loads(line) for line in (HERE / name).read_text().splitlines()]
    return {(line["start"], line["mode"], line["turn"]): line for line in lines}


RECORDED, DRAFTS = by_turn("suffix_decoding_trace.jsonl"), by_turn("suffix_decoding_drafts.jsonl")


def answer_of(turn):
    ids = turn["output_ids"]
    return ids[: ids.index(EOS)] + [EOS] if EOS in ids else [*ids, EOS]


def replayed(drafter, prompt, answer):
    """The steps of a session whose target gives this answer: accepted length, source, what was looked up."""
    session, at = drafter.session(), 1
    session.begin(prompt)
    session.observe(SimpleNamespace(tokens=answer[:1]))
    while at < len(answer):
        source, looked_up = session.look_up()
        draft = session.draft(answer[at - 1])
        tree, tokens = draft.tree, draft.tokens.tolist()
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
    drafter, steps, drafted = SuffixDecoding(2048, **settings), 0, 0
    for turn in TURNS:
        if start == "cold":
            drafter.reset()
        for _, _, looked_up in replayed(drafter, turn["prompt_ids"], answer_of(turn)):
            steps, drafted = steps + 1, drafted + len(looked_up.tokens)
    return steps, drafted


@WAYS
@STARTS
def test_every_step_of_every_turn_is_the_public_codes(start, mode):
    drafter, total, compared = SuffixDecoding(2048, branches=mode == "tree"), 0, 0
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


@WAYS
@STARTS
@pytest.mark.parametrize("first", [3, pytest.param(56, marks=pytest.mark.slow)])
def test_the_engine_takes_these_steps(start, mode, first):
    target = Target(embedded())
    drafter = SuffixDecoding(target.vocab_size, branches=mode == "tree")
    for number, turn in enumerate(TURNS[:first], 1):
        if start == "cold":
            drafter.reset()
        out = generate(
            target, drafter, turn["prompt_ids"], max_new_tokens=200, eos={EOS}, execution="static"
        )
        recorded = RECORDED[start, mode, number]
        assert out.tokens == answer_of(turn)
        assert out.accept_lengths == [1, *(int(length, 36) for length in recorded["accepted"])]
        assert [step.nodes - 1 for step in out.steps] == [
            0,
            *(int(count, 36) for count in recorded["drafted"]),
        ]


TOTALS = [  # steps and, where known, drafted tokens
    (dict(start="hot", depth=24, nodes=24, branches=True), 2214, 4998),
    (dict(start="hot", nodes=16, branches=True), 2214, 5080),
    (dict(start="cold", min_token_prob=0.3), 2969, None),
    (dict(start="cold", factor=4, offset=8, branches=True), 2648, None),
    (dict(start="hot", factor=4, offset=8, branches=True), 1849, 22593),
    (dict(start="hot", factor=4, offset=8), 1948, None),
    (dict(start="hot", cached_answers=8, branches=True), 2264, 4957),
    (dict(start="hot", cached_answers=1), 2956, 3678),
]


@pytest.mark.parametrize(("settings", "steps", "drafted"), TOTALS)
def test_other_settings_take_the_public_codes_steps(settings, steps, drafted):
    counted = totals(**settings)
    assert counted == (steps, counted[1] if drafted is None else drafted)


THIRD = 1 / 3
KNOWN = [  # texts, context, settings, tokens, parents, probabilities
    ("1 2 3 1 2", "1 2 3 1 2", {}, "3 1", [-1, 0], [0.5, 0.5]),
    ("1 2 3 1 2", "2", {}, "", [], []),
    ("1 2 1 3 1", "9 1", {}, "2", [-1], [THIRD]),
    ("1 2 1 3 1 3 1", "9 1", {}, "3", [-1], [0.5]),
    ("1 2 1 3 1 3 1 2 1", "9 1", {}, "2", [-1], [0.4]),
    (
        *("1 2 1 3 1 4 1 4 1 3 1", "9 1", dict(offset=5, branches=True)),
        *("4 3 1 1 4 3", [-1, -1, 0, 1, 2, 2], [THIRD] * 4 + [THIRD / 2] * 2),
    ),
    (
        *("1 2 1 3 1 4 1", "9 1", dict(offset=9, branches=True)),
        *("2 3 4 1 1 1 3 4 1 1", [-1, -1, -1, 0, 1, 2, 3, 4, 6, 7], [0.25] * 10),
    ),
    ("1 2 1 3 1 4 1", "9 1", dict(offset=9), "2 1 3 1 4 1", [-1, 0, 1, 2, 3, 4], [0.25] * 6),
    (
        *("1 2 3 4 5 / 1 2 3 4 6 / 1 2 7 4 5", "9 1", dict(offset=9, branches=True)),
        *("2 3 4 7 5 6 4 5", [-1, 0, 1, 0, 2, 2, 3, 6], [1, 2 * THIRD, 2 * THIRD] + [THIRD] * 5),
    ),
    ("5 6 7 / 5 6 7 / 5 6", "4 5 6", {}, "7", [-1], [2 * THIRD]),
    ("1 2 3 4 5 6 7 8", "0 1 2 3", dict(depth=5), "4 5", [-1, 0], [1, 1]),
]


def limits(*, offset=0, branches=False):
    return Limits(64, np.float32(1), np.float32(offset), np.float32(0.1), branches)


@pytest.mark.parametrize(("texts", "context", "settings", "tokens", "parents", "probs"), KNOWN)
def test_known_answers(texts, context, settings, tokens, parents, probs):
    trie = SuffixTrie(settings.get("depth", 64))
    for text in texts.split("/"):
        trie.extend(GrowingText(), list(map(int, text.split())))
    drafted = trie.draft(
        list(map(int, context.split())),
        limits(**{name: value for name, value in settings.items() if name != "depth"}),
    )
    assert (drafted.tokens, drafted.parents) == (list(map(int, tokens.split())), parents)
    assert drafted.probs == pytest.approx(probs, rel=1e-6) and drafted.score == pytest.approx(
        sum(probs), rel=1e-6
    )


class PlainTrie:
    """Every string has its count, and its children in order: counted anew, without anything left out."""

    def __init__(self, depth):
        self.depth, self.count, self.children = depth, {}, {(): []}

    def change(self, string, by):
        siblings, count = self.children[string[:-1]], self.count.get(string, 0)
        self.count[string] = count + by
        if by > 0 and not count:
            siblings.append(string)
            self.children[string] = []
            return
        counts = [self.count[other] if other != string else count for other in siblings]
        at = siblings.index(string)
        siblings.pop(at)
        if by < 0:
            place = sum(other >= count for other in counts) - 1
        elif counts.index(count) == at:
            place = sum(other > count + 1 for other in counts)
        else:
            place = counts.index(count)
        if count + by:
            siblings.insert(place, string)
        else:
            del self.count[string], self.children[string]


def listed(trie):
    """Every string of a trie: its count, and its children's last tokens and counts. Strings between nodes, too."""
    found, waiting = {}, [((), trie.root)]
    while waiting:
        string, node = waiting.pop()
        found[string] = [(child.token, child.count) for child in node.ordered]
        for child in node.ordered:
            edge = child.text[child.start(node.depth) : child.known]
            assert (
                child.parent is node and edge[0] == child.token and node.child(child.token) is child
            )
            assert tuple(child.text[child.end - child.depth : child.known]) == (*string, *edge)
            if node is not trie.root:  # else it would have been left out
                assert len(node.ordered) > 1 or child.count < node.count
            for i in range(1, len(edge)):
                found[(*string, *edge[:i])] = [(edge[i], child.count)]
            waiting.append(((*string, *edge), child))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_texts_that_grow_in_turns_and_go_are_counted_as_by_a_plain_trie(seed):
    rng = random.Random(seed)
    alphabet, depth = rng.choice((2, 3, 5)), rng.choice((2, 3, 6))
    lazy, plain, texts = SuffixTrie(depth), PlainTrie(depth), []
    for _ in range(250):
        if len(texts) < 2 or rng.random() < 0.04:
            texts.append(GrowingText())
        if len(texts) > 5:
            gone = texts.pop(0)
            lazy.remove(gone)
            for start in range(len(gone.tokens)):
                for end in range(min(start + depth, len(gone.tokens)), start, -1):
                    plain.change(tuple(gone.tokens[start:end]), -1)
        text = rng.choice(texts[-3:])
        for _ in range(rng.choice((1, 1, 2, 5))):
            lazy.extend(text, [rng.randrange(alphabet)])
            tokens = text.tokens
            for start in range(max(len(tokens) - depth, 0), len(tokens)):
                plain.change(tuple(tokens[start:]), 1)
        assert listed(lazy) == {
            string: [(child[-1], plain.count[child]) for child in children]
            for string, children in plain.children.items()
        }


@WAYS
@pytest.mark.parametrize("seed", range(4))
def test_no_length_of_match_that_is_left_out_would_score_as_much(mode, seed):
    """Texts that repeat themselves, so that drafts reach the depth of the trie."""
    rng, draft_from = random.Random(seed), {"chain": _chain, "tree": _tree}[mode]
    trie, text = SuffixTrie(rng.choice((8, 20))), GrowingText()
    for _ in range(60):
        again = rng.randrange(len(text.tokens)) if text.tokens and rng.random() < 0.7 else None
        new = (
            [rng.randrange(3)]
            if again is None
            else text.tokens[again : again + rng.randrange(1, 40)]
        )
        trie.extend(text, new)
        context = text.tokens[-trie.depth :]
        for factor, offset in ((1, 0), (4, 8), (0.5, 3)):
            allowed = limits(branches=mode == "tree", offset=offset)._replace(
                factor=np.float32(factor)
            )
            best = trie.draft([], allowed)
            for bound, match, most, node, at in trie._matches(context, allowed):
                drafted = draft_from(node, at, trie.depth - match, most, allowed.min_prob)
                assert drafted.score <= bound
                best = drafted if drafted.score >= best.score else best
            assert trie.draft(context, allowed) == best


def test_the_oldest_answers_are_forgotten_and_a_saved_state_goes_on_exactly():
    """Even a running answer may be forgotten."""
    rng, drafter = random.Random(0), SuffixDecoding(V, cached_answers=3)
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
    kept = [text.tokens for text in drafter.answers.texts.values()]
    assert kept == texts[-3:]
    fresh = SuffixTrie(64)
    for text in kept:
        fresh.extend(GrowingText(), text)
    assert {
        string: sorted(rest) for string, rest in listed(drafter.answers.trie).items() if rest[1:]
    } == {string: sorted(rest) for string, rest in listed(fresh).items() if rest[1:]}


def test_answers_that_run_at_once_see_each_other_and_a_reset_parts_them():
    drafter = SuffixDecoding(V)
    first, second = drafter.session(), drafter.session()
    first.begin([50])
    second.begin([51])
    first.observe(SimpleNamespace(tokens=[7, 8, 9]))
    second.observe(SimpleNamespace(tokens=[7, 8]))
    assert second.look_up()[1].tokens == [9] and second.look_up()[0] == "answers"
    drafter.reset()
    drafter.session().begin([52])  # whose number the first one's was
    for session in (first, second):
        session.observe(SimpleNamespace(tokens=[9]))
    assert [text.tokens for text in drafter.answers.texts.values()] == [[]]


def test_a_state_that_is_none_is_refused_and_changes_nothing():
    drafter = SuffixDecoding(V)
    generate(Target(toy_model("llama")), drafter, [5, 6, 7], max_new_tokens=20)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    log = before["answers"]
    wrong = [
        ({}, "no log of numbers and tokens"),
        ({"answers": log.float()}, "holds torch.float32, and should torch.int32"),
        ({"answers": log[:, :1]}, "no log of numbers and tokens"),
        ({"answers": log + 61}, "token ids outside the vocabulary of 61"),
        ({"answers": log - 2}, "token ids outside the vocabulary of 61"),
        (
            {"answers": log, "orders": before["orders"][:-1]},
            "saved orders are not those of the saved answers",
        ),
        ({"answers": log, "orders": before["orders"].flip(0)}, "saved orders are not those"),
        (
            {"answers": log, "orders": torch.zeros_like(before["orders"])},
            "saved orders are not those",
        ),
        (
            {"answers": log, "orders": torch.cat([before["orders"]] * 2)},
            "saved orders are not those",
        ),
    ]
    for state, message in wrong:
        with pytest.raises(UserError, match=message):
            drafter.load_state_dict(state)
        assert torch.equal(drafter.state_dict()["answers"], log)


def test_memory_and_state_are_of_the_kept_answers():
    """Memory by Python's own count, with answers that repeat themselves and each other."""
    rng = random.Random(0)
    answers = [[rng.randrange(400) for _ in range(200)] for _ in range(4)]
    drafter = SuffixDecoding(400, cached_answers=8)
    for text in answers:  # forgotten again
        drafter.answers.extend(drafter.answers.begin(), text)
    tracemalloc.start()
    try:
        for text in answers * 2:
            number = drafter.answers.begin()
            drafter.answers.extend(number, text)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept / (8 * 200) <= 600
    assert len(drafter.state_dict()["answers"]) == 8 * 201
