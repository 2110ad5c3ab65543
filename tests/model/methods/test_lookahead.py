"""Lookahead decoding against a slow reference: the same tokens in the same accepted lengths, step by step."""

import random

import pytest

from model.engine import Target, generate
from model.methods.rivals.lookahead import Lookahead
from tests.conftest import greedy, toy_model
from tests.model.methods.lookahead_reference import SlowLookahead


@pytest.mark.parametrize("level, window, guess", [(5, 7, 7), (3, 4, 2)])
@pytest.mark.parametrize("name, seed", [("llama", 5), ("gpt2", 2)])
def test_same_steps_as_the_reference(name, seed, level, window, guess):
    model = toy_model(name, seed=seed)
    rng = random.Random(seed)
    settings = dict(level=level, window=window, guess=guess)
    start = [rng.randrange(3, 61) for _ in range(6)]
    prompt = start + greedy(model, start, 30) + start
    free = greedy(model, prompt, 50)
    slow = SlowLookahead(model, **settings)
    target = Target(model)
    drafter = Lookahead(**settings)
    for limit, eos in ((50, []), (50, [free[25]])):
        tokens, lengths = slow.decode(prompt, limit, eos)
        out = generate(target, drafter, prompt, max_new_tokens=limit, eos=eos)
        assert (out.tokens, out.accept_lengths) == (tokens, lengths)
        assert limit < 50 or eos or max(lengths) >= 3
