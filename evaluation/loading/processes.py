"""One run on several processes (`torchrun`): who is who, who writes, and who speaks when something fails.

Every rank runs the same loop on the same tokens: the logits are gathered whole, so that all ranks read the same numbers
and take the same decisions. Files, progress and messages are the first rank's alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed

from model.errors import UserError

from ..errors import user_errors
from ..records.rows import Row
from ..records.run_folder import AnswerStore

T = TypeVar("T")


def world_size() -> int:
    """Processes that torchrun started for this run; 1 without torchrun."""
    return _torchrun("WORLD_SIZE", 1)


def rank() -> int:
    """This process among them."""
    return _torchrun("RANK", 0)


def local_rank() -> int:
    """This process among those on this host."""
    return _torchrun("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Processes of this run on this host."""
    return _torchrun("LOCAL_WORLD_SIZE", 1)


def _torchrun(name: str, alone: int) -> int:
    # Clusters set WORLD_SIZE and RANK for purposes of their own; only torchrun sets its run's id.
    return int(os.environ[name]) if "TORCHELASTIC_RUN_ID" in os.environ else alone


def check_launcher(arguments: list[str]) -> None:
    """Raises UserError: under torchrun every rank would start the launcher's jobs once more."""
    for argument in arguments:
        group, _, choice = argument.lstrip("+").partition("=")
        if world_size() > 1 and group in ("launcher", "hydra/launcher") and choice != "basic":
            raise UserError(f"{argument}: not under torchrun, where all processes work on one run; leave one of them")


@contextmanager
def one_voice() -> Iterator[None]:
    """Under torchrun an error ends this process at once, and the first rank that fails is the only one to tell.

    At once, because the others wait for this rank in the next collective: torchrun ends them when it sees one gone. No
    job of a sweep follows, as the ranks could be in different jobs then.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        if world_size() == 1:
            raise
        if _rendezvous().add("evaluation/failures", 1) > 1:  # the same mistake, or only what the first one's end caused
            sys.exit(1)
        with user_errors():
            raise


def meet(key: str) -> None:
    """Wait until all ranks are here, however long. No collective: those spin on the device, which may be in use."""
    if world_size() > 1:
        _rendezvous().add(f"evaluation/{key}", 1)
        while _rendezvous().add(f"evaluation/{key}", 0) < world_size():
            time.sleep(0.02)


@lru_cache(maxsize=1)
def _rendezvous() -> Any:
    """torchrun's own key-value store, there before any process group is."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)
    )


def leave() -> None:
    """Take leave of the others at the end of the last run."""
    if world_size() > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def open_store(folder: Path, answer_file: Path | None) -> AnswerStore:
    """The store of a run: the first rank's where there are several."""
    return AnswerStore(folder, answer_file) if world_size() == 1 else GroupStore(folder, answer_file)


class GroupStore(AnswerStore):
    """A store that the first rank alone touches; what it reads, all ranks get."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        with super().locked() if rank() == 0 else nullcontext():
            yield

    def begin(self, metadata: dict[str, Any], mixed: bool = False) -> dict[Any, Row]:
        read = super().begin
        return from_first(lambda: read(metadata, mixed))

    def is_finished(self) -> bool:
        return from_first(super().is_finished)

    def state_at(self, answered: int) -> dict[str, torch.Tensor]:
        read = super().state_at
        return from_first(lambda: read(answered))

    def last_state(self, answered: int) -> dict[str, torch.Tensor]:
        read = super().last_state
        return from_first(lambda: read(answered))

    def append(self, row: Row, state: dict[str, torch.Tensor], answered: int) -> None:
        if rank() == 0:
            super().append(row, state, answered)

    def finish(self, summary: dict[str, Any], state: dict[str, torch.Tensor], answered: int) -> None:
        if rank() == 0:
            super().finish(summary, state, answered)


def from_first(read: Callable[[], T]) -> T:
    """What the first rank reads, on all of them; for files and clocks, which may differ where the tokens do not."""
    if world_size() == 1:
        return read()
    found = [read() if rank() == 0 else None]
    torch.distributed.broadcast_object_list(found, src=0)
    return found[0]  # type: ignore[return-value]
