"""Every setting of transformers' generate is honoured, decides nothing, or is refused by name."""

from functools import partial

import pytest
import torch
from transformers import GenerationConfig

from model import generate as generate_settings
from model.errors import UserError
from model.generate import DRAWS, IRRELEVANT, OUTPUTS, PROCESSORS, READ, REFUSED, Generate
from tests.conftest import toy_model

FIELDS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
PROMPT = [5, 9, 5, 9, 5]


def answer(settings, **more):
    model, ids = toy_model("llama"), torch.tensor([PROMPT])
    settings = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": []} | settings
    return model.generate(ids, **settings, **more)


def test_every_field_of_the_installed_version_is_in_one_list():
    lists = [set(names) for names in (DRAWS, PROCESSORS, READ, IRRELEVANT, REFUSED, OUTPUTS)]
    assert sum(map(len, lists)) == len(set.union(*lists)), "in one alone"
    assert not FIELDS - set.union(*lists), "a field that nobody has looked at"


def test_what_is_not_done_is_refused_by_name():
    model, ours = toy_model("llama"), Generate()
    for name in REFUSED.keys() & FIELDS:
        config = GenerationConfig(max_length=20, return_dict_in_generate=False)
        setattr(config, name, 7)
        with pytest.raises(UserError, match=name):
            generate_settings.refuse(model, torch.tensor([PROMPT]), config, {})
    for settings, says in (
        *(({name: True, "return_dict_in_generate": True}, name) for name in OUTPUTS),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"do_sample": True, "num_return_sequences": 2}, "several sequences, num_return_sequences"),
    ):
        with pytest.raises(UserError, match=says):
            answer(settings, custom_generate=ours)


def test_a_field_that_nobody_knows_is_refused_as_soon_as_it_is_used(monkeypatch):
    others = tuple(name for name in PROCESSORS if name != "no_repeat_ngram_size")
    monkeypatch.setattr(generate_settings, "PROCESSORS", others)
    assert answer({}, custom_generate=Generate()).equal(answer({})), "not where it is as ever"
    with pytest.raises(UserError, match="no_repeat_ngram_size"):
        answer({"no_repeat_ngram_size": 2}, custom_generate=Generate())


def test_remarks_of_a_checkpoint_are_no_settings():
    """Some publish fields of their own beside transformers'."""
    config = GenerationConfig(max_new_tokens=20, chat_format="chatml", pad_token_id=0)
    model, ids = toy_model("llama"), torch.tensor([PROMPT])
    ours = model.generate(ids, generation_config=config, custom_generate=Generate())
    assert ours.equal(model.generate(ids, generation_config=config))


GREEDY = {
    "max_length": {"max_length": 12, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 7},
    "min_length": {"min_length": 25, "eos_token_id": [35, 54]},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": [35, 54]},
    "eos_token_id": {"eos_token_id": 54},
    "max_time": {"max_time": 0.0},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 5.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[36], [54, 53]]},
    "sequence_bias": {"sequence_bias": [[[7], 30.0], [[54], -30.0]]},
    "suppress_tokens": {"suppress_tokens": [54, 35]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [36, 54, 16]},
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "forced_eos_token_id": {"forced_eos_token_id": 8},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 3.0), "eos_token_id": 9},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
}


def test_what_is_honoured_does_what_it_does_in_generate():
    ours = Generate()
    for name, settings in GREEDY.items():
        assert answer(settings, custom_generate=ours).equal(answer(settings)), name


DRAWN = {
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.3,
    "top_h": 0.2,
    "min_p": 0.9,
    "typical_p": 0.2,
    "epsilon_cutoff": 0.3,
    "eta_cutoff": 0.9,
}


def test_what_narrows_a_draw_is_among_the_processors():
    """So that the draw with it is another one than without."""
    texts = {}
    for name in [None, *DRAWN.keys() & FIELDS]:
        torch.manual_seed(3)
        drawn = {"do_sample": True, "temperature": 20.0, "top_k": 0} | ({name: DRAWN[name]} if name else {})
        texts[name] = answer(drawn, custom_generate=Generate("vanilla")).tolist()
    assert len(texts) > 6 and [name for name, text in texts.items() if text == texts[None]] == [None]


def test_inputs_that_this_decoding_would_not_see_are_refused():
    """A mask that hides nothing is no padding: transformers leaves it out by 5.23, and hands it on by 5.17."""
    model, ids = toy_model("llama"), torch.tensor([PROMPT])
    config = GenerationConfig(max_length=20, return_dict_in_generate=False)
    refuse = partial(generate_settings.refuse, model, ids, config)
    refuse({"attention_mask": torch.ones_like(ids)})
    for name, value, says in (
        ("position_ids", torch.arange(5)[None] + 3, "position_ids"),
        ("token_type_ids", torch.zeros(1, 5), "token_type_ids"),
        ("attention_mask", torch.tensor([[0, 1, 1, 1, 1]]), "padding"),
    ):
        with pytest.raises(UserError, match=says):
            refuse({name: value})
    with pytest.raises(UserError, match="position_ids"):
        model.generate(ids, position_ids=torch.arange(5)[None] + 3, max_new_tokens=4, custom_generate=Generate())


def test_irrelevant_settings_change_nothing():
    for settings in ({"use_cache": False}, {"cache_implementation": "static"}, {"length_penalty": 2.0}):
        assert answer(settings, custom_generate=Generate()).equal(answer({}))
