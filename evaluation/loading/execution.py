"""How a run's steps are executed: what the library chooses, where the run's other settings leave it the choice."""

from __future__ import annotations

from model import tuning
from model.errors import UserError
from model.tuning import Execution

from . import processes
from .models import LoadedModel


def choose_execution(name: str, loaded: LoadedModel, timed: bool = True, reads_text: bool = False) -> Execution:
    """The execution that was asked for, or what `tuning.choose_execution` makes of auto.

    Args:
        timed: else methods share eager forwards.
        reads_text: sampling looks at the text, which eager steps alone can give it.

    Raises:
        UserError: not with a device map, or not untimed; or as `tuning.choose_execution`.
    """
    target, attention = loaded.target, loaded.settings.attention
    if name not in ("auto", "eager"):
        if not timed:
            raise UserError(
                f"execution={name}: with timed=false the methods share eager forwards; leave out one of the two"
            )
        if len(target.devices) > 1:
            raise UserError(
                f"execution={name}: a device map's model takes eager steps only; with model.tensor_parallel=true each "
                "process has one device, and they take any"
            )
    # no trial with several ranks: one that fails it leaves the others waiting
    if name == "auto" and (not timed or reads_text or processes.world_size() > 1):
        return Execution("eager", attention == "tree")
    return tuning.choose_execution(target, name, attention)
