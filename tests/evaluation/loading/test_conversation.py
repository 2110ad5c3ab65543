"""Prompts: fschat's Vicuna template to the letter, a model's own template where it has one."""

import pytest
from fastchat.conversation import get_conv_template
from transformers import AutoTokenizer

from evaluation.loading.bench import answer_text, chat_of, choose_template, prompt_ids, prompt_text
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
    for template in ("vicuna_v1.1", "llama-2"):  # the one by our own words, the other by fschat
        for turns, answers in ((["a"], []), (["a"], ["x"]), (["a", "b"], ["x"])):
            chat, fschat = chat_of(turns, answers), get_conv_template(template)
            for i, text in enumerate(
                [*(turn["content"] for turn in chat), *[None] * (len(chat) % 2)]
            ):
                fschat.append_message(fschat.roles[i % 2], text)
            assert prompt_text(template, tokenizer, chat) == fschat.get_prompt()
    assert (
        prompt_text("vicuna_v1.1", tokenizer, chat_of(["a"], [])) == f"{SYSTEM} USER: a ASSISTANT:"
    )
    ids = prompt_ids("vicuna_v1.1", tokenizer, ["a", "b"], ["x"])
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.eos_token_id) == 1


def test_the_models_own_template_is_preferred_and_adds_no_second_bos(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert choose_template(None, tokenizer, "lmsys/Vicuna-7b") == "vicuna_v1.1"
    assert choose_template(None, tokenizer, "a/base-model") == "raw"
    assert prompt_text("raw", tokenizer, chat_of(["a", "b"], ["x"])) == "a\n\nx\n\nb"
    assert (
        answer_text("raw", tokenizer, prompt_ids("raw", tokenizer, ["the answer"], []))
        == "the answer"
    )
    tokenizer.chat_template = OWN
    assert choose_template(None, tokenizer, "lmsys/Vicuna-7b") == "chat"
    assert (
        prompt_text("chat", tokenizer, chat_of(["a", "b"], ["x"]))
        == "<user>a<assistant>x<user>b<assistant>"
    )
    assert tokenizer.bos_token_id not in prompt_ids("chat", tokenizer, ["a"], [])


def test_unknown_templates_are_refused(tokenizer):
    with pytest.raises(UserError, match="no such conversation template"):
        choose_template("vicuna_v9", tokenizer, "")
    with pytest.raises(UserError, match="has no chat template"):
        choose_template("chat", tokenizer, "")


class Common:
    """As mistral-common's tokenizers: chats become ids by code, without a template that could be looked at."""

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        return [len(message["content"]) for message in messages]


def test_a_tokenizer_that_makes_prompts_by_itself_is_asked():
    assert choose_template(None, Common(), "") == choose_template("chat", Common(), "") == "chat"
    assert prompt_ids("chat", Common(), ["a", "bb"], ["xxx"]) == [1, 3, 2]


def test_an_answer_is_read_without_special_tokens(tokenizer):
    ids = tokenizer(" the answer is one.", add_special_tokens=False).input_ids
    assert (
        answer_text("vicuna_v1.1", tokenizer, [*ids, tokenizer.eos_token_id])
        == "the answer is one."
    )
