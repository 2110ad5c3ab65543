"""Prompts: chats formatted by the model's template, and token ids in any form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import UserError

# the tokenizer's own template; no template: the texts alone, for a base model
CHAT = "chat"
RAW = "raw"
VICUNA = "vicuna_v1.1"  # fschat's template, as Vicuna's files have none
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
ROLES = ("user", "assistant")
Turns = Sequence[Mapping[str, Any]]  # roles and contents


def takes_chats(tokenizer: Any) -> bool:
    """True if it has a template or, as mistral-common's, code of its own."""
    from transformers import PreTrainedTokenizerBase

    by_template = PreTrainedTokenizerBase.apply_chat_template
    method = getattr(type(tokenizer), "apply_chat_template", by_template)
    return method is not by_template or bool(getattr(tokenizer, "chat_template", None))


def default_template(tokenizer: Any, name: str) -> str:
    if takes_chats(tokenizer):
        return CHAT
    return VICUNA if "vicuna" in name.lower() else RAW


def alternating(turns: Turns) -> list[str]:
    if any(turn["role"] != ROLES[i % 2] for i, turn in enumerate(turns)):
        raise ValueError("it takes a user's and an assistant's turns alternately")
    return [str(turn["content"]) for turn in turns]


def chat_text(template: str, turns: Turns) -> str:
    """Return a chat's text by RAW or VICUNA, after a user's turn with an answer's beginning."""
    contents = alternating(turns)
    if template == RAW:
        return "\n\n".join(contents)
    parts = [
        f"ASSISTANT: {text}</s>" if i % 2 else f"USER: {text} " for i, text in enumerate(contents)
    ]
    return f"{SYSTEM} {''.join(parts)}" + "ASSISTANT:" * (len(parts) % 2)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    bos = getattr(tokenizer, "bos_token", None)
    options = {"add_special_tokens": False} if bos and text.startswith(bos) else {}
    return list(tokenizer(text, **options)["input_ids"])


def chat_ids(tokenizer: Any, turns: Turns, **options: Any) -> list[int]:
    ids = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False, **options
    )
    return [int(i) for i in ids]


def several(prompts: Any) -> list[Any]:
    rows = _listed(prompts)
    if isinstance(rows, str) or hasattr(rows, "keys") or not isinstance(rows, Iterable):
        raise UserError(
            f"prompts: is of type {type(rows).__name__}; give a list of texts, chats or rows of"
            " token ids"
        )
    return list(rows)


def one_row(prompt: Any) -> list[Any]:
    """Return a prompt's ids as Python numbers, or the turns of its chat."""
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise UserError(
                f"prompt: is a mapping of {', '.join(map(str, prompt))[:80]}, without input_ids"
            )
        mask = prompt.get("attention_mask")
        if mask is not None and 0 in one_row(mask):
            raise UserError("prompt: attention_mask leaves tokens out; give ids unpadded")
        return one_row(prompt["input_ids"])

    numbers = _listed(prompt)
    if not isinstance(numbers, Sequence) or isinstance(numbers, str | bytes):
        raise UserError(
            f"prompt: is of type {type(numbers).__name__}; give text, a chat or a list of token ids"
        )

    numbers = [_listed(number) for number in numbers]
    if not any(isinstance(row, list | tuple) for row in numbers):
        return numbers
    if len(numbers) > 1:
        raise UserError(
            f"prompt: has {len(numbers)} rows; a decoder answers one, give them one by one"
        )
    return one_row(numbers[0])


def _listed(numbers: Any) -> Any:
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers
