"""One run on several processes (`torchrun`), for `model.tensor_parallel`: all that depends on a rank.

Every rank runs the same loop on the same tokens: the logits are gathered, so that all ranks decide alike. Only the
first rank writes files, progress and messages.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed

from model.errors import UserError

from ..errors import Failure, user_message
from ..records.store import AnswerStore


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


@contextmanager
def ranks(arguments: list[str]) -> Iterator[None]:
    """Run a command, under torchrun on all ranks: only the first one prints, and an error ends all.

    Only the first rank that fails prints its error. The others wait for it in the next collective, and torchrun ends
    them when it sees one exit.

    Raises:
        UserError: a launcher under torchrun, where every rank would start its jobs again.
    """
    if world_size() == 1:
        yield
        return
    for argument in arguments:
        group, _, choice = argument.lstrip("+").partition("=")
        if group in ("launcher", "hydra/launcher") and choice != "basic":
            raise UserError(f"{argument}: not under torchrun, where all processes work on one run; leave one of them")
    shown = sys.stdout, sys.stderr
    if rank() > 0:
        sys.stdout = sys.stderr = io.StringIO()
    try:
        yield
    except (Exception, KeyboardInterrupt):
        if _rendezvous().add("evaluation/failures", 1) > 1:  # the same error, or a consequence of it
            sys.exit(1)
        raise
    finally:
        sys.stdout, sys.stderr = shown
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def note_failure(error: Exception) -> Failure:
    """Note a job's failure, so that the others of its sweep go on. Raises the error if it is a defect.

    Under torchrun it always does, as the ranks could be in different jobs.
    """
    message = user_message(error)
    if message is None or world_size() > 1:
        raise error
    return Failure(message)


def on_first_rank(write: Callable[..., object], *arguments: Any) -> None:
    """Call a function that writes files, on the first rank alone."""
    if rank() == 0:
        write(*arguments)


_barriers = itertools.count()


def wait_for_ranks() -> None:
    """Wait until all ranks are here, without a collective, as that would spin on a device that may be in use."""
    if world_size() > 1:
        key = f"evaluation/barriers/{next(_barriers)}"
        _rendezvous().add(key, 1)
        while _rendezvous().add(key, 0) < world_size():
            time.sleep(0.02)


@lru_cache(maxsize=1)
def _rendezvous() -> Any:
    """Return torchrun's key-value store, which needs no process group."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)
    )


def check_ranks(parallel: bool) -> None:
    """Raise UserError unless torchrun started as many processes as `model.tensor_parallel` can use."""
    if parallel and world_size() == 1:
        raise UserError(
            "model.tensor_parallel=true: needs several processes; start it with "
            "torchrun --nproc-per-node NUMBER_OF_GPUS -m evaluation.run ..."
        )
    if not parallel and world_size() > 1:
        raise UserError(
            f"torchrun started {world_size()} processes, which work together with model.tensor_parallel=true only"
        )
    if parallel and torch.cuda.is_available() and local_world_size() > torch.cuda.device_count():
        raise UserError(
            f"torchrun started {local_world_size()} processes, but this machine has {torch.cuda.device_count()} CUDA "
            "device(s); give as many to --nproc-per-node"
        )


def open_store(folder: Path, answer_file: Path | None) -> AnswerStore:
    """Open the store of a run; of several ranks only the first one reads and writes."""
    store = AnswerStore(folder, answer_file)
    return store if world_size() == 1 else cast(AnswerStore, FirstRankStore(store))


class FirstRankStore:
    """A store that only the first rank opens; on all ranks its methods return what they return there."""

    def __init__(self, store: AnswerStore) -> None:
        self._store = store

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._store.locked() if rank() == 0 else nullcontext():
            yield

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def on_all_ranks(*arguments: Any) -> Any:
            values = [method(*arguments) if rank() == 0 else None]
            torch.distributed.broadcast_object_list(values, src=0)
            return values[0]

        return on_all_ranks
