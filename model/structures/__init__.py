"""What methods share: rows of candidates, kept text, automata, n-gram tables, datastores, learned heads.

From outside: checks of settings, which are here, and any class by its file. May import `engine`.
"""

from typing import Any

from ..errors import UserError

MAX_NODES = 4096  # of a draft
PADDING = 512  # vocabularies of one tokenizer, padded for different models, differ by fewer rows


def check_whole(method: str, least: int, most: int | None = None, **settings: Any) -> None:
    """Raise UserError if one of a method's settings is no whole number in a range."""
    for name, value in settings.items():
        if type(value) is not int or value < least or (most is not None and value > most):
            limits = f"from {least} to {most}" if most is not None else f"at least {least}"
            raise UserError(f"{method}: {name}={value} must be {limits}, a whole number")
