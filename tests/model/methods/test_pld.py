"""Prompt look-up against transformers' own: the same tokens by the same number of forwards."""

import random

import pytest

from model.engine import Target, generate
from model.methods.pld import PromptLookup
from tests.conftest import generated, greedy, toy_model


@pytest.mark.parametrize("ngram", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_same_tokens_and_forwards_as_transformers(seed, ngram):
    model, rng = toy_model(["llama", "gpt2"][seed % 2], seed=seed), random.Random(seed)
    target = Target(model)
    start = [rng.randrange(3, 61) for _ in range(6)]
    # A prompt that holds its own answer, cut short: the draft from the prompt, inside the prefill, gets accepted too.
    prompt = start + greedy(model, start, 40) + start
    prompt = prompt if seed else start + greedy(model, start, 20)[: rng.randrange(1, 20)]
    free = greedy(model, prompt, 50)
    for limit, eos in ((50, None), (17, None), (50, [free[30], free[12]])):
        expected = generated(model, prompt, limit, eos, prompt_lookup_num_tokens=10, max_matching_ngram_size=ngram)
        drafter = PromptLookup(max_ngram=ngram, eos=eos or ())
        out = generate(target, drafter, prompt, max_new_tokens=limit, eos=eos or ())
        assert (out.tokens, out.forwards) == expected


def test_longest_ngram_first_then_the_first_place():
    drafter = PromptLookup(max_ngram=2, draft_tokens=3)
    # (1, 2) stands at 0 and at 5: the first place wins, although (2,) alone stands elsewhere, too
    assert drafter.session().begin([1, 2, 3, 4, 5, 1, 2, 9, 2, 8, 1, 2]).tokens.tolist() == [2, 3, 4, 5]
    assert drafter.session().begin([1, 2, 3, 4, 7, 2]).tokens.tolist() == [2, 3, 4, 7]  # no bigram: the single token
    assert drafter.session().begin([1, 2, 3]).tokens.tolist() == [3]  # no match: the root alone
    stopping = PromptLookup(max_ngram=1, eos=[4])  # a copy stops before EOS
    assert stopping.session().begin([3, 4, 5, 3]).tokens.tolist() == [3]
