"""Checks of settings that methods share."""

from __future__ import annotations

from typing import Any

from ..errors import UserError

MAX_NODES = 4096  # of a draft


def check_whole(method: str, least: int, most: int | None = None, **settings: Any) -> None:
    """Raise UserError if one of a method's settings is no whole number in a range."""
    for name, value in settings.items():
        if type(value) is not int or value < least or (most is not None and value > most):
            limits = f"from {least} to {most}" if most is not None else f"at least {least}"
            raise UserError(f"{method}: {name}={value} must be {limits}, a whole number")
