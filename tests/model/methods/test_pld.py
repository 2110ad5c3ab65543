"""Prompt look-up against transformers' own: the same tokens by the same number of forwards."""

import random

import pytest
import transformers

from model.engine import Target, generate
from model.methods.copying.pld import PromptLookup
from tests.conftest import generated, greedy, toy_model


@pytest.mark.parametrize("ngram", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_same_tokens_and_forwards_as_transformers(seed, ngram):
    model = toy_model(["llama", "gpt2"][seed % 2], seed=seed)
    rng = random.Random(seed)
    target = Target(model)
    start = [rng.randrange(3, 61) for _ in range(6)]
    # A prompt that holds its own answer, cut short: the draft from the prompt, inside the prefill, gets accepted too.
    prompt = start + greedy(model, start, 40) + start
    prompt = prompt if seed else start + greedy(model, start, 20)[: rng.randrange(1, 20)]
    free = greedy(model, prompt, 50)
    for limit, eos in ((50, None), (17, None), (50, [free[30], free[12]])):
        expected = generated(
            model, prompt, limit, eos, prompt_lookup_num_tokens=10, max_matching_ngram_size=ngram
        )
        if not expected[0] and transformers.__version__.startswith("5.17."):
            continue  # which answers nothing where the first token is EOS
        drafter = PromptLookup(max_ngram=ngram, eos=eos or ())
        out = generate(target, drafter, prompt, max_new_tokens=limit, eos=eos or ())
        assert (out.tokens, out.forwards) == expected
