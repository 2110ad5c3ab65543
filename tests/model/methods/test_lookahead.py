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
            forwards.append(
                {tuple(tokens[node] for node in chain[1:]) for chain in tree.chain_of[1:]}
            )
            account(verification)

        session.account = told

    each_session(drafter, watch)
    return forwards


@pytest.mark.parametrize("level, window, guess", [(5, 7, 7), (3, 4, 2), (4, 1, 1)])
@pytest.mark.parametrize("name, seed", [("llama", 5), ("gpt2", 2)])
def test_same_steps_as_the_reference(name, seed, level, window, guess):
    model, rng = toy_model(name, seed=seed), random.Random(seed)
    settings = dict(level=level, window=window, guess=guess)
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
        # the case shows what it should: a full guess set, drafts that stand
        if limit == 50 and not eos:
            assert max(map(len, guesses)) == guess and max(lengths) >= 3
