"""Prompts: fschat's Vicuna template to the letter, a model's own template where it has one."""

import pytest
from fastchat.conversation import get_conv_template
from transformers import AutoTokenizer

from evaluation.loading.bench import answer_text, chat_of, choose_template, prompt_ids, prompt_text
from model.errors import UserError

OWN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.mark.parametrize("template", ["vicuna_v1.1", "llama-2"])  # by our own words, and by fschat
@pytest.mark.parametrize("answers", [[], ["x"]])
def test_templates_of_fschat_to_the_letter(tokenizer, template, answers):
    turns = ["a", "b"][: len(answers) + 1]
    fschat = get_conv_template(template)
    for i, text in enumerate(["a", *answers, "b"][: 2 * len(turns) - 1] + [None]):
        fschat.append_message(fschat.roles[i % 2], text)
    assert prompt_text(template, chat_of(turns, answers)) == fschat.get_prompt()
    ids = prompt_ids("vicuna_v1.1", tokenizer, chat_of(turns, answers))
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.eos_token_id) == len(answers)


def test_the_models_own_template_is_preferred_and_adds_no_second_bos(tokenizer):
    assert choose_template(None, tokenizer, "lmsys/Vicuna-7b") == "vicuna_v1.1"
    assert choose_template(None, tokenizer, "a/base-model") == "raw"
    for name, words in (
        ("vicuna_v9", "no such conversation template"),
        ("chat", "no chat template"),
    ):
        with pytest.raises(UserError, match=words):
            choose_template(name, tokenizer, "")
    chat = chat_of(["a", "b"], ["x"])
    assert prompt_text("raw", chat) == "a\n\nx\n\nb"
    tokenizer.chat_template = OWN
    assert choose_template(None, tokenizer, "lmsys/Vicuna-7b") == "chat"
    text = "<user>a<assistant>x<user>b<assistant>"
    own = tokenizer(text, add_special_tokens=False).input_ids
    assert prompt_ids("chat", tokenizer, chat) == own
    assert tokenizer.bos_token_id not in prompt_ids("chat", tokenizer, chat_of(["a"], []))


def test_a_text_that_begins_with_bos_gets_no_second_one(tokenizer):
    for text in ("a", "<s>a"):
        ids = prompt_ids("raw", tokenizer, chat_of([text], []))
        assert ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1


class Common:
    """As mistral-common's tokenizers: chats become ids by code, without a template to look at."""

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        return [len(message["content"]) for message in messages]


def test_a_tokenizer_that_makes_prompts_by_itself_is_asked():
    assert choose_template(None, Common(), "") == choose_template("chat", Common(), "") == "chat"
    assert prompt_ids("chat", Common(), chat_of(["a", "bb"], ["xxx"])) == [1, 3, 2]


def test_an_answer_is_read_without_special_tokens(tokenizer):
    ids = tokenizer(" the answer is one.", add_special_tokens=False).input_ids
    ended = [*ids, tokenizer.eos_token_id]
    assert answer_text("vicuna_v1.1", tokenizer, ended) == "the answer is one."
