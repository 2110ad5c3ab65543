"""From the turns of a conversation to prompt ids: fschat's template, or the model's own chat template."""

from __future__ import annotations

import hashlib
from typing import Any

from fastchat.conversation import conv_templates, get_conv_template

from model.errors import UserError

OWN = "chat"  # the name of the tokenizer's own chat template
DEFAULT = "vicuna_v1.1"


def choose_template(name: str | None, tokenizer: Any) -> str:
    """The template to use: the one asked for, else the model's own, else Vicuna's. Raises UserError if unknown."""
    has_own = bool(getattr(tokenizer, "chat_template", None))
    if name is None:
        return OWN if has_own else DEFAULT
    if name == OWN and not has_own:
        raise UserError(
            "model.template=chat: this tokenizer has no chat template; name one of fschat's, e.g. vicuna_v1.1"
        )
    if name != OWN and name not in conv_templates:
        raise UserError(f"model.template={name}: fschat has no such conversation template")
    return name


def prompt_text(template: str, tokenizer: Any, turns: list[str], answers: list[str]) -> str:
    """The prompt before answer number len(answers): `turns` of the user so far, `answers` of the model between them."""
    if template == OWN:
        messages = []
        for i, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if i < len(answers):
                messages.append({"role": "assistant", "content": answers[i]})
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    conversation = get_conv_template(template)
    for i, turn in enumerate(turns):
        conversation.append_message(conversation.roles[0], turn)
        conversation.append_message(conversation.roles[1], answers[i] if i < len(answers) else None)
    return str(conversation.get_prompt())


def prompt_ids(template: str, tokenizer: Any, turns: list[str], answers: list[str]) -> list[int]:
    """Token ids of `prompt_text`; a chat template writes its own special tokens, so none is added then."""
    text = prompt_text(template, tokenizer, turns, answers)
    ids = tokenizer(text, add_special_tokens=template != OWN).input_ids
    return [int(i) for i in ids]


def answer_text(template: str, tokenizer: Any, tokens: list[int]) -> str:
    """What the user reads: special tokens left out, cut at the template's stop string."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    stop = None if template == OWN else get_conv_template(template).stop_str
    for mark in [stop] if isinstance(stop, str) else stop or []:
        text = text.split(mark, 1)[0]
    return str(text.strip())


def template_hash(template: str, tokenizer: Any) -> str:
    """sha256 of a prompt of two turns: changes when the template or the tokenizer's specials do."""
    sample = prompt_text(template, tokenizer, ["question one", "question two"], ["answer one"])
    return hashlib.sha256(sample.encode()).hexdigest()
