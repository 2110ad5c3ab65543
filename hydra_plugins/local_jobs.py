"""submitit's launcher for this machine (launcher=submitit_local), whose jobs see the GPUs that the command sees.

submitit gives each job CUDA_VISIBLE_DEVICES=0,...,N-1 for gpus_per_node=N, and no GPU where that is not set: it knows
neither how many there are nor which of them this command may use. The jobs share them by model.device=auto.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"


def restored(kind: type[object], visible: str | None) -> object:
    """An empty launcher, in a process that sees what the command's sees."""
    os.environ.pop(VISIBLE, None)
    if visible is not None:
        os.environ[VISIBLE] = visible
    return object.__new__(kind)


with suppress(ImportError):  # optional: requirements-cluster.txt
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import LocalLauncher

    class LocalJobs(LocalLauncher):
        """The launcher travels to each job's process, and is the first thing unpickled there: torch comes later."""

        def __reduce__(self) -> tuple[Any, ...]:
            return restored, (type(self), os.environ.get(VISIBLE)), self.__dict__
