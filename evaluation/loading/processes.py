"""One run on several processes (`torchrun`): ranks, which of them writes files, and which reports an error.

Every rank runs the same loop on the same tokens: the logits are gathered, so that all ranks decide alike. Only the
first rank writes files, progress and messages.
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
from ..records.store import AnswerStore

T = TypeVar("T")


def world_size() -> int:
    """Return the number of processes that torchrun started for this run; 1 without torchrun."""
    return _torchrun("WORLD_SIZE", 1)


def rank() -> int:
    """Return this process's number."""
    return _torchrun("RANK", 0)


def local_rank() -> int:
    """Return this process's number on this host."""
    return _torchrun("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Return the number of this run's processes on this host."""
    return _torchrun("LOCAL_WORLD_SIZE", 1)


def _torchrun(name: str, alone: int) -> int:
    # Clusters also set WORLD_SIZE and RANK; only torchrun sets its run's id.
    return int(os.environ[name]) if "TORCHELASTIC_RUN_ID" in os.environ else alone


def check_launcher(arguments: list[str]) -> None:
    """Raise UserError for a launcher under torchrun, where every rank would start its jobs again."""
    for argument in arguments:
        group, _, choice = argument.lstrip("+").partition("=")
        if world_size() > 1 and group in ("launcher", "hydra/launcher") and choice != "basic":
            raise UserError(f"{argument}: not under torchrun, where all processes work on one run; leave one of them")


@contextmanager
def report_first_error() -> Iterator[None]:
    """Under torchrun end this process at an error; only the first rank that fails prints it.

    The others wait for this rank in the next collective, and torchrun ends them when it sees one exit. No
    further job of a sweep runs, as the ranks could be in different jobs.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        if world_size() == 1:
            raise
        if _rendezvous().add("evaluation/failures", 1) > 1:  # the same error, or a consequence of it
            sys.exit(1)
        with user_errors():
            raise


def wait_for_ranks(key: str) -> None:
    """Wait until all ranks are here, without a collective, as that would spin on a device that may be in use."""
    if world_size() > 1:
        _rendezvous().add(f"evaluation/{key}", 1)
        while _rendezvous().add(f"evaluation/{key}", 0) < world_size():
            time.sleep(0.02)


@lru_cache(maxsize=1)
def _rendezvous() -> Any:
    """Return torchrun's key-value store, which needs no process group."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)
    )


def destroy_group() -> None:
    """Destroy the process group at the end of the last run."""
    if world_size() > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def open_store(folder: Path, answer_file: Path | None) -> AnswerStore:
    """Open the store of a run; with several ranks only the first one uses it."""
    return AnswerStore(folder, answer_file) if world_size() == 1 else FirstRankStore(folder, answer_file)


class FirstRankStore(AnswerStore):
    """A store that only the first rank opens; all ranks get what it reads."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        with super().locked() if rank() == 0 else nullcontext():
            yield

    def begin(self, metadata: dict[str, Any], mixed: bool = False) -> dict[Any, Row]:
        read = super().begin
        return from_first_rank(lambda: read(metadata, mixed))

    def is_finished(self) -> bool:
        return from_first_rank(super().is_finished)

    def state_at(self, answered: int) -> dict[str, torch.Tensor]:
        read = super().state_at
        return from_first_rank(lambda: read(answered))

    def last_state(self, answered: int) -> dict[str, torch.Tensor]:
        read = super().last_state
        return from_first_rank(lambda: read(answered))

    def append(self, row: Row, state: dict[str, torch.Tensor], answered: int) -> None:
        if rank() == 0:
            super().append(row, state, answered)

    def finish(self, summary: dict[str, Any], state: dict[str, torch.Tensor], answered: int) -> None:
        if rank() == 0:
            super().finish(summary, state, answered)


def from_first_rank(read: Callable[[], T]) -> T:
    """Return on all ranks what the first one reads, as files and clocks may differ between them."""
    if world_size() == 1:
        return read()
    values = [read() if rank() == 0 else None]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]  # type: ignore[return-value]
