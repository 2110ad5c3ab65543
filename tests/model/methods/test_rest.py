"""REST: the datastore against brute force, the draft tree against a trie made by counting."""

import random
from collections import Counter

import numpy as np
import pytest

from model.engine.rule.tree import arranged
from model.errors import UserError
from model.methods.copying.datastore import Datastore, write_datastore
from model.methods.copying.rest import Rest, most_frequent


def store(path, tokens, vocab):
    write_datastore(path, np.array(tokens), vocab)
    return Datastore(path, vocab_size=vocab)


def count(ngram, tokens):
    return sum(tokens[i : i + len(ngram)] == ngram for i in range(len(tokens)))


@pytest.mark.parametrize("vocab", [5, 2**16, 2**16 + 1])
def test_the_longest_suffix_is_found_as_often_as_it_occurs(tmp_path, vocab):
    rng = random.Random(vocab)
    alphabet = [0, 1, 2, *(rng.randrange(vocab) for _ in range(2)), vocab - 1]
    tokens = [rng.choice(alphabet) for _ in range(200)]
    tokens += tokens[:3] * 60 + tokens[:20]  # a periodic text takes every round of sorting
    datastore = store(tmp_path / "d", tokens, vocab)
    assert len(datastore) == 400
    for _ in range(60):
        context = [rng.choice(alphabet) for _ in range(rng.randrange(1, 12))]
        if rng.random() < 0.5:
            place = rng.randrange(389)
            context += tokens[place : place + 12]
        for least, most in ((1, 16), (2, 5), (3, 3), (len(context), len(context))):
            lengths = [
                n for n in range(least, min(most, len(context)) + 1) if count(context[-n:], tokens)
            ]
            n, first, last = datastore.longest(context, min_n=least, max_n=most)
            assert n == max(lengths, default=0)
            assert last - first == (count(context[-n:], tokens) if n else 0)


def test_damaged_and_foreign_files_are_refused(tmp_path):
    good = tmp_path / "good"
    store(good, list(range(50)) * 100, 50)
    data = good.read_bytes()
    (tmp_path / "text").write_bytes(b'{"text": "a JSONL file"}' * 20)
    (tmp_path / "cut").write_bytes(data[:-1])
    store(tmp_path / "wide", [7] * 9, 2**16)
    for name, vocab, says in (
        ("absent", 50, "missing, cut short, or not of this version; build one"),
        ("good", 562, "vocabulary has 50 tokens, the model's 562"),
        ("wide", 2**16 + 64, "the model's 65600"),  # its ids have two bytes
        ("text", 50, "cut short, or not of this version"),
        ("cut", 50, "cut short, or not of this version"),
    ):
        with pytest.raises(UserError, match=says):
            Datastore(tmp_path / name, vocab_size=vocab)
    padded = Datastore(good, vocab_size=64)
    assert padded.longest([3, 63], min_n=1, max_n=2) == (0, 0, 0), "padded rows of a tokenizer"
    with pytest.raises(UserError, match="no tokens"):
        store(tmp_path / "empty", [], 3)


@pytest.mark.parametrize("seed", range(8))
def test_tree_holds_the_most_frequent_prefixes(seed):
    rng = random.Random(seed)
    rows = sorted(
        [rng.choice([0, 0, 0, 1, 2]) for _ in range(rng.randrange(1, 6))]
        for _ in range(rng.randrange(1, 80))
    )
    frequency = Counter(tuple(row[: d + 1]) for row in rows for d in range(len(row)))
    padded = np.array([row + [-1] * (5 - len(row)) for row in rows])
    wanted = rng.choice([1, 5, 20, 64])
    parents, tokens = most_frequent(padded, wanted)
    draft, _ = arranged([0, *tokens], parents)
    tree = draft.tree
    tokens = draft.tokens[1:].tolist()
    paths = [tuple(tokens[node - 1] for node in chain[1:]) for chain in tree.chain_of[1:]]
    assert len(set(paths)) == len(paths) == min(wanted, len(frequency))
    # in this order of preference, as the docstring has it
    assert set(paths) == set(sorted(frequency, key=lambda p: (-frequency[p], len(p), p))[:wanted])
    # siblings: the more frequent first
    for path, ranks in zip(paths, tree.rank_paths[1:], strict=True):
        siblings = [p for p in paths if p[:-1] == path[:-1]]
        assert sum(frequency[p] > frequency[path] for p in siblings) <= ranks[-1]


def test_a_draft_by_hand(tmp_path):
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3, 4, 8, 9, 7, 3, 6]
    write_datastore(tmp_path / "d", np.array(tokens), 10)

    def draft(context, **settings):
        drafter = Rest(datastore_path=str(tmp_path / "d"), vocab_size=10, **settings)
        session = drafter.session()
        assert session.begin(context[:1]).tokens.tolist() == context[:1]  # nothing in the prefill
        session._context = context
        drafted = session.draft(context[-1])
        return drafted.tree.parents.tolist(), drafted.tokens.tolist()

    # (2, 3) stands three times: 4 twice (then 9 and 8), 5 once (then 9)
    assert draft([6, 2, 3], depth=2) == ([0, 0, 0, 1, 1, 2], [3, 4, 5, 8, 9, 9])
    assert draft([9, 2, 3], depth=1, max_ngram=1, min_ngram=1) == ([0, 0, 0, 0], [3, 4, 5, 6])
    assert draft([8, 3]) == ([0], [3])  # (8, 3) nowhere, and 3 alone is too short
    # nothing from an end on
    assert draft([6, 2, 3], depth=3, eos=[9]) == ([0, 0, 0, 1], [3, 4, 5, 8])
    assert draft([3, 6]) == ([0], [6])  # at the datastore's end
