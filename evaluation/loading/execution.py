"""Choose how a run's steps are executed: the library's choice, if the run's other settings permit it."""

from __future__ import annotations

from model import tuning
from model.errors import UserError
from model.tuning import Execution

from .models import LoadedModel


def choose_execution(name: str, loaded: LoadedModel, timed: bool = True, reads_text: bool = False) -> Execution:
    """Return the execution asked for, or the choice of `tuning.choose_execution` for auto.

    Args:
        timed: False if methods share eager forwards.
        reads_text: True if sampling depends on the text, which only eager steps provide.

    Raises:
        UserError: it excludes a device map or timed=false; or as `tuning.choose_execution`.
    """
    target = loaded.target
    if name not in ("auto", "eager"):
        if not timed:
            raise UserError(
                f"execution={name}: with timed=false the methods share eager forwards; leave out one of the two"
            )
        if len(target.devices) > 1:
            raise UserError(f"execution={name}: a device map's model takes eager steps only")
    if name == "auto" and (not timed or reads_text):
        return Execution("eager")
    return tuning.choose_execution(target, name)
