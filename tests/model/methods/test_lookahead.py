"""Lookahead decoding against a slow reference: the same tokens in the same accepted lengths, step by step."""

import random

import pytest
import torch

from model.engine import Target, generate
from model.errors import UserError
from model.methods.lookahead import Lookahead
from model.structures.ngram_table import NgramTable
from tests.conftest import greedy, toy_model
from tests.model.methods.lookahead_reference import SlowLookahead
from tests.model.sessions import each_session


def watched(drafter):
    """What each forward of the drafter's last sequence saw below its root: a set of token sequences."""
    forwards = []

    def watch(session):
        forwards.clear()
        account = session.account

        def told(verification):
            tokens, tree = verification.draft.tokens.tolist(), verification.draft.tree
            forwards.append({tuple(tokens[node] for node in chain[1:]) for chain in tree.chain_of[1:]})
            account(verification)

        session.account = told

    each_session(drafter, watch)
    return forwards


@pytest.mark.parametrize("level, window, guess", [(5, 7, 7), (3, 4, 2), (4, 1, 1)])
@pytest.mark.parametrize("pool_from_prompt", [False, True])
@pytest.mark.parametrize("name, seed", [("llama", 5), ("gpt2", 2), ("gpt-neox", 4)])
def test_same_steps_as_the_reference(name, seed, pool_from_prompt, level, window, guess):
    model, rng = toy_model(name, seed=seed), random.Random(seed)
    settings = dict(level=level, window=window, guess=guess, pool_from_prompt=pool_from_prompt)
    start = [rng.randrange(3, 61) for _ in range(6)]
    prompt = start + greedy(model, start, 30) + start
    free = greedy(model, prompt, 50)
    slow, target, drafter = SlowLookahead(model, **settings), Target(model), Lookahead(**settings)
    forwards = watched(drafter)
    for limit, eos in ((50, []), (13, []), (50, [free[25]])):
        tokens, lengths, seen, guesses = slow.decode(prompt, limit, eos)
        out = generate(target, drafter, prompt, max_new_tokens=limit, eos=eos)
        assert (out.tokens, out.accept_lengths) == (tokens, lengths)
        assert forwards == seen
        assert out.tokens == greedy(model, prompt, limit, eos or None)
        if limit == 50 and not eos:  # the case shows what it should: a full guess set, drafts that stand
            assert max(map(len, guesses)) == guess and max(lengths) >= 3


def test_the_layout_is_the_mask_of_the_papers_figure():
    """N = 4, W = 5, two guesses: who sees whom, by (level, column), written down from the figure."""
    drafter = Lookahead(level=4, window=5, guess=2)
    layout = drafter.layouts[2, 2]
    tree, names = layout.tree, ["root"] + [f"o{i}" for i in range(1, 5)]
    names += [f"g{i}" for i in range(1, 6)] + [f"r{i}" for i in range(2, 7)]  # orange, green, red, with their positions
    names += ["a1", "a2", "a3", "b1", "b2", "b3"]  # the guesses
    names = [names[i] for i in layout.order]
    sees = {names[i]: {names[j] for j in tree.ancestors[i].nonzero()[:, 0].tolist()} for i in range(len(tree))}
    assert len(tree) == 1 + 4 + 5 + 5 + 6
    assert sees["o3"] == {"root", "o1", "o2", "o3"}
    assert sees["g1"] == {"root", "g1"}
    assert sees["g5"] == {"root", "o1", "o2", "o3", "o4", "g5"}
    assert sees["r6"] == {"root", "o1", "o2", "o3", "o4", "g5", "r6"}
    assert sees["r2"] == {"root", "g1", "r2"}
    assert sees["a3"] == {"root", "a1", "a2", "a3"} and sees["b2"] == {"root", "b1", "b2"}
    positions = {name: int(depth) for name, depth in zip(names, tree.depths, strict=True)}
    assert positions.pop("root") == 0 and all(position == int(name[1:]) for name, position in positions.items())
    assert [names[i] for i in layout.last] == ["r2", "r3", "r4", "r5", "r6"]


def test_sizes_of_the_leaderboards_setting():
    drafter = Lookahead(level=5, window=7, guess=7)
    sizes = {key: len(layout.tree) for key, layout in drafter.layouts.items()}
    # filling: 9 random tokens, then 8 + 9, 7 + 2 * 8; filled: 6 + 3 * 7, and 4 for each guess
    assert sizes == {(0, 0): 10, (1, 0): 18, (2, 0): 24} | {(3, g): 28 + 4 * g for g in range(8)}
    assert drafter.max_nodes == 56


def test_the_pool_forgets_what_was_not_seen_for_longest():
    pool = NgramTable(1, 2, capacity=100, followers=2)
    for rest in ((1, 2), (3, 4), (1, 2), (5, 6)):  # (1, 2) is seen again, so (3, 4) goes
        pool.add((9,), rest)
    assert pool.followers_of((9,)) == [(5, 6), (1, 2)] and pool.followers_of((8,)) == []


def test_a_prompt_of_one_token(llama):
    out = generate(Target(llama), Lookahead(), [7], max_new_tokens=20)
    assert out.tokens == greedy(llama, [7], 20)
    session = Lookahead().session()
    assert session.begin([7]) is None
    assert torch.equal(session.draft(7).tokens, torch.full((10,), 7))


@pytest.mark.parametrize("wrong", [dict(level=2), dict(window=0), dict(guess=0)])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(UserError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        Lookahead(**wrong)
