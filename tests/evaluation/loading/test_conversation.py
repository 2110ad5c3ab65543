"""Prompts: fschat's Vicuna template to the letter, a model's own template where it has one."""

import pytest
from transformers import AutoTokenizer

from evaluation.loading.bench import answer_text, choose_template, prompt_ids, prompt_text
from model.errors import UserError

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
OWN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


def test_vicuna_to_the_letter(tokenizer):
    assert prompt_text("vicuna_v1.1", tokenizer, ["a"], []) == f"{SYSTEM} USER: a ASSISTANT:"
    two = prompt_text("vicuna_v1.1", tokenizer, ["a", "b"], ["x"])
    assert two == f"{SYSTEM} USER: a ASSISTANT: x</s>USER: b ASSISTANT:"
    ids = prompt_ids("vicuna_v1.1", tokenizer, ["a", "b"], ["x"])
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.eos_token_id) == 1


def test_the_models_own_template_is_preferred_and_adds_no_second_bos(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert choose_template(None, tokenizer) == "vicuna_v1.1"
    tokenizer.chat_template = OWN
    assert choose_template(None, tokenizer) == "chat"
    assert prompt_text("chat", tokenizer, ["a", "b"], ["x"]) == "<user>a<assistant>x<user>b<assistant>"
    assert tokenizer.bos_token_id not in prompt_ids("chat", tokenizer, ["a"], [])


def test_unknown_templates_are_refused(tokenizer):
    with pytest.raises(UserError, match="no such conversation template"):
        choose_template("vicuna_v9", tokenizer)
    with pytest.raises(UserError, match="has no chat template"):
        choose_template("chat", tokenizer)


def test_an_answer_is_read_without_special_tokens(tokenizer):
    ids = tokenizer(" the answer is one.", add_special_tokens=False).input_ids
    assert answer_text("vicuna_v1.1", tokenizer, [*ids, tokenizer.eos_token_id]) == "the answer is one."
