"""Limits of settings that methods share."""

from typing import Any

from ..errors import UserError

MAX_NODES = 4096  # nodes of a draft
MAX_KEPT = 1 << 24  # n-grams, answers or nodes of a trie that are kept between prompts
PADDING = 512  # vocabularies of one tokenizer, padded for different models, differ by fewer rows


def check_whole(method: str, low: int, high: int = MAX_NODES, **settings: Any) -> None:
    for name, value in settings.items():
        if type(value) is not int or not low <= value <= high:
            raise UserError(
                f"{method}: {name}={value!r} must be from {low} to {high}, a whole number"
            )
