"""Lookahead decoding against a slow reference: the same tokens in the same accepted lengths, step by step."""

import random

import pytest

from model.engine import Target, generate
from model.methods.lookahead import Lookahead
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
@pytest.mark.parametrize("pool_from_prompt, name, seed", [(False, "llama", 5), (True, "gpt2", 2)])
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
