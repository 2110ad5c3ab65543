"""Heads that share keys: the same numbers as transformers' sdpa, and whatever it is not made for stays sdpa's."""

import random

import pytest
import torch

from model.decoding import Draft, Target, generate
from model.decoding.grouped_attention import NAME, GroupedAttention
from model.recycling import TokenRecycling, build_template
from tests.conftest import greedy, toy_model


@pytest.mark.parametrize("kind", ["llama-grouped", "qwen2", "qwen3", "gemma", "mistral"])
@torch.inference_mode()
def test_logits_are_those_of_sdpa_to_the_last_bit(kind):
    model, rng = toy_model(kind), random.Random(5)
    target, tree = Target(model), build_template("best", nodes=12)
    assert model.config._attn_implementation == NAME
    prompt = [rng.randrange(3, 61) for _ in range(30)]
    draft = Draft(tree, torch.tensor([rng.randrange(3, 61) for _ in range(13)]))
    found = {}
    for name in (NAME, "sdpa"):
        model.set_attn_implementation(name)
        with target.cache(13) as cache:
            target.prefill(cache, prompt)
            found[name] = target.forward(cache, draft)
    assert torch.equal(found[NAME], found["sdpa"])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt-neox"])
def test_models_whose_heads_share_nothing_are_left_alone(kind):
    model = toy_model(kind)
    Target(model)
    assert model.config._attn_implementation == "sdpa"


def test_generate_with_padding_is_what_it_was():
    """The model is the caller's: what transformers does with it afterwards must not change."""
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [8, 9, 10, 11, 12, 13]])
    given = dict(attention_mask=(ids != 0).long(), max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = toy_model("llama-grouped").generate(ids, **given)
    model = toy_model("llama-grouped")
    drafter = TokenRecycling(61, build_template("2.2.2"))
    assert generate(Target(model), drafter, [5, 6, 7], max_new_tokens=20).tokens == greedy(model, [5, 6, 7], 20)
    assert torch.equal(model.generate(ids, **given), expected)


def test_what_changes_the_scores_goes_to_sdpa_which_refuses_it():
    query, shared = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="softcap"):
        GroupedAttention()(torch.nn.Module(), query, shared, shared, torch.zeros(1, 1, 3, 5), softcap=30.0)


def test_a_second_target_may_be_made_of_the_same_model():
    model = toy_model("llama-grouped")
    for execution in ("eager", "static"):
        drafter = TokenRecycling(61, build_template("2.2.2"))
        found = generate(Target(model, execution=execution), drafter, [5, 6, 7], max_new_tokens=20)
        assert found.tokens == greedy(model, [5, 6, 7], 20)
