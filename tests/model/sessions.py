"""Sessions looked at from within."""

from collections.abc import Callable
from typing import Any

from model.decoding import Drafter, Session


def each_session(drafter: Drafter, change: Callable[[Any], None]) -> None:
    """Every session of this drafter, from now on, is changed by this before it begins."""
    make = drafter.session

    def session() -> Session:
        made = make()
        change(made)
        return made

    drafter.session = session  # type: ignore[method-assign]
