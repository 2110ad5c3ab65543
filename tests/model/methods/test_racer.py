"""RACER: against the public code's own trace, its tree and trie by hand, hash order, what is inserted, refusals.

racer_trace.jsonl: one line a turn, cold, then hot; recorded from github.com/hkr04/RACER by its own loop, LLaMA and
cache (as tested at commit 1ef37ab; transformers 4.52.3, torch 2.13, float32, one thread; capacity 64, at most 200
tokens, no warm-up). Turns and prompts are those of official_trace.jsonl. `accept_lengths` count a step's root and
accepted drafts; every tree has 64 nodes.

The public code takes one more step, with the end of the answer as its root, where that is the target's own next token.
Here the loop is made to take it: it knows no end, and stops a token behind it.
"""

import json
import random
from pathlib import Path

import pytest
import torch

from model.engine import Target, generate
from model.errors import UserError
from model.methods.racer import Racer
from model.structures.ngram_trie import HASH_BUCKETS, NgramTrie, add_in_hash_order, hash_order
from tests.conftest import greedy, toy_model
from tests.model.methods.public_traces import EOS, TRACE, embedded

V = 61


def test_the_oldest_node_is_reused_with_its_children():
    """A prefix is older than its extension: 1 goes first, and 1 2 and 1 2 3 cannot be reached any more."""
    trie = NgramTrie(3, 5, 2)
    trie.insert([1, 2, 3])
    trie.insert([4, 5, 6])  # a node is left for 4; 5 takes that of 1, 6 that of 1 2
    assert len(trie.parent) == 5 and list(trie.children[0]) == [4]
    assert trie.token == [0, 5, 6, 3, 4] and trie.parent[3] == 2, "what held 1 2 holds 4 5 6 now"
    assert trie.children[2] == {} and trie.depth[2] == 3


# As g++ 12 printed them of std::unordered_map<int, int>: +t inserts, -t erases
PRINTED = [
    ("+1 +2 +14 +15 +27 -14 +3 +40", [3, 15, 2, 40, 27, 1]),
    ("+5 +18 +6 -5 -18 +31", [31, 6]),
    (
        "+0 +7 +14 +21 +28 +35 +42 +49 +56 +63 +70 +77 +84 +91 +98 -0 +4 +33",  # 29 buckets from the fourteenth on
        [98, 33, 4, 91, 7, 14, 21, 28, 35, 42, 49, 56, 63, 70, 77, 84],
    ),
]


def test_hash_order_is_what_the_compiler_does_also_of_a_new_map():
    for changes, printed in PRINTED:
        order, buckets = [], 1
        for change in changes.split():
            token = int(change[1:])
            if change[0] == "+":
                buckets = add_in_hash_order(order, token, buckets)
            else:
                order.remove(token)
        assert order == printed
    rng = random.Random(0)
    for size in (0, 1, 2, 5, 13, 14, 29, 30, 100, 300):
        tokens, order, buckets = rng.sample(range(500), size), [], 1
        for token in tokens:
            buckets = add_in_hash_order(order, token, buckets)
        assert hash_order(tokens) == order and (buckets == 1 or buckets in HASH_BUCKETS)


def test_a_reset_forgets_what_an_open_sequence_says_too():
    drafter = Racer(V, ngram=2)
    session = drafter.session()
    session.begin([5, 6, 7])
    drafter.reset()
    session.draft(8)
    session.close()
    assert len(drafter.trie.parent) == 1 and drafter.trie.current == 0


def test_what_is_accepted_behind_the_end_is_not_inserted_and_the_end_is():
    """The end as a draft that is accepted, and as the target's own next token, which no step has as its root."""
    model = toy_model("llama")
    target, prompt = Target(model), [5, 6, 7, 8]
    answer = greedy(model, prompt, 30)
    for end in {token for token in answer[2:] if answer.index(token) > 1}:
        said = answer[: answer.index(end) + 1]
        # the second time the answer is retrieved, and accepted to its end and beyond
        for times in (
            1,
            2,
        ):
            drafter = Racer(V, ngram=2, eos={end})
            for _ in range(times):
                out = generate(target, drafter, prompt, max_new_tokens=30, eos={end})
                assert out.tokens == said
            text, trie = prompt + said, drafter.trie
            pairs = {
                (trie.token[node], after)
                for node in trie.children[0].values()
                for after in trie.children[node]
            }
            assert pairs == set(zip(text, text[1:], strict=False))


BROKEN = [
    ("candidates", lambda t: t[:-1]),
    ("trie_parent", lambda t: t[:-1]),
    ("trie_fail", lambda t: t + len(t)),
    ("trie_token", lambda t: t + V),
    ("trie_depth", lambda t: t + 11),
    ("trie_recency", lambda t: t * 0),
    ("trie_children", lambda t: t + len(t)),
    ("trie_children", lambda t: t * 0),
    ("trie_children", lambda t: t.flip(0)),
    ("trie_fail", lambda t: torch.ones_like(t)),
    ("trie_buckets", lambda t: t * 0),
    ("trie_token", lambda t: t.float()),
    ("trie_token", lambda t: t.to(torch.complex64)),
    ("trie_freq", lambda t: -t),
    ("trie_counts", lambda t: t + 1),
    ("trie_place", lambda t: t - 1),
    ("trie_place", None),
]


def test_a_state_that_is_none_is_refused_and_changes_nothing():
    drafter = Racer(V)
    generate(Target(toy_model("llama")), drafter, [5, 6, 7], max_new_tokens=20)
    before = {key: tensor.clone() for key, tensor in drafter.state_dict().items()}
    for name, change in BROKEN:
        wrong = {key: tensor for key, tensor in before.items() if key != name}
        if change is not None:
            wrong[name] = change(before[name])
        with pytest.raises(
            UserError,
            match="the saved trie is not one of at most 10000 nodes|start: the saved (matrix|trie_token)",
        ):
            drafter.load_state_dict(wrong)
        assert all(torch.equal(tensor, before[key]) for key, tensor in drafter.state_dict().items())
    with pytest.raises(UserError, match="at most 20 nodes for 10-grams"):
        Racer(V, trie_nodes=20).load_state_dict(before)


LINES = Path(__file__).with_name("racer_trace.jsonl").read_text().splitlines()
RECORDED = {
    (turn["start"], turn["question_id"]): turn["accept_lengths"] for turn in map(json.loads, LINES)
}


def answer_of(turn):
    """The recorded answer, which is Token Recycling's, too, up to its end."""
    ids = turn["output_ids"]
    return ids[: ids.index(EOS)] if EOS in ids else ids


@pytest.mark.parametrize("first", [4, pytest.param(56, marks=pytest.mark.slow)])
@pytest.mark.parametrize("start", ["cold", "hot"])
def test_every_length_is_the_recorded_one(start, first):
    turns = [turn for turn in TRACE if turn["start"] == start]
    target = Target(embedded())
    drafter = Racer(target.vocab_size, eos={EOS})
    for turn in turns[:first]:
        recorded, answer = RECORDED[start, turn["question_id"]], [*answer_of(turn), EOS]
        if start == "cold":
            drafter.reset()
        out = generate(target, drafter, turn["prompt_ids"], max_new_tokens=len(answer) + 1)
        assert out.tokens[:-1] == answer
        # the first token, which the prefill gives, is the first root, and counted with it
        assert out.accept_lengths == [1, *recorded], turn["question_id"]
        assert [step.nodes for step in out.steps] == [1] + [64] * len(recorded), turn["question_id"]
    assert len(turns) == 56
