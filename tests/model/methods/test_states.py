"""Saved states: a state that does not fit is refused and changes nothing."""

import pytest
import torch

from model.engine import Target, generate
from model.errors import UserError
from tests.conftest import toy_model
from tests.model.every_method import V, make

# by method: a tensor of token ids
IDS = {
    "dynamic": "row_ids",
    "recycling": "candidates",
    "suffix with history": "text",
    "logitspec": "text",
    "goose": "row_ids",
    "racer": "trie_token",
    "ngram_cache": "ngrams",
    "suffix_decoding": "answers",
}
SMALLER = [("dynamic", "k"), ("dynamic", "pairs"), ("racer", "ngram"), ("ngram_cache", "leader")]
PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def target():
    return Target(toy_model("llama"))


def refused(drafter, state):
    before = {key: tensor.clone() for key, tensor in drafter.state_dict().items()}
    with pytest.raises(UserError, match="start: "):
        drafter.load_state_dict(state)
    after = drafter.state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


@pytest.mark.parametrize("name", IDS)
def test_a_damaged_state_is_refused(name, target):
    drafter = make(name, target, {})
    generate(target, drafter, PROMPT, max_new_tokens=20)
    state = {key: tensor.clone() for key, tensor in drafter.state_dict().items()}
    ids = state[IDS[name]]
    generate(target, drafter, PROMPT[1:], max_new_tokens=20)
    for wrong in (ids + V, ids.reshape(-1, 1, 1)):
        refused(drafter, state | {IDS[name]: wrong})


@pytest.mark.parametrize(("name", "setting"), SMALLER)
def test_a_state_of_other_settings_is_refused(name, setting, target):
    drafter = make(name, target, {})
    generate(target, drafter, PROMPT * 3, max_new_tokens=20)
    refused(make(name, target, {}, **{setting: 2}), drafter.state_dict())
