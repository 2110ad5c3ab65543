"""Batches: several sequences in one forward, each with the text that it has alone.

Each sequence has a stretch of columns of one cache, and its rows see nothing else. A sequence that
ends leaves its stretch to the next prompt.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from ...errors import UserError
from ..attention.checks import PAST_END, TRIAL, check_error, refusing_errors
from ..contract.drafter import DeviceDrafter, Drafter
from ..rule.tree import Draft, Tree
from ..target.target import Target
from .answer import Decoding, Generation, Request
from .loop import first_forward, open_sequence
from .step import Executor, Steps

ROOM = 512  # columns of a stretch at first


class Batch(Steps):
    """The sequences that are decoded together, in the order in which they began and learn."""

    def __init__(self, target: Target, drafter: Drafter, size: int) -> None:
        self.target = target
        self.drafter = drafter
        # the last batch's, with its captured steps
        idle = target.idle_batch
        target.idle_batch = None
        fits = idle is not None and len(idle.lengths) == size
        cache = idle if fits else target.caches.make(size * ROOM, stretches=size)
        super().__init__(cache, Executor(target, drafter.device))

    def begin(self, number: int, prompt: list[int], request: Request) -> Decoding:
        """Begin a sequence: forward its prompt alone, and copy its states into the shared cache."""
        check_batch(self.target, request.execution)
        start = time.perf_counter()
        session = self.drafter.session()
        with ExitStack() as ends, ExitStack() as failed:
            failed.callback(session.close)
            alone = replace(request, execution="eager")
            member = open_sequence(self.target, session, prompt, alone, ends)
            member.number = number
            member.start = start
            first_forward(member)
            member.request = request
            if not member.out.stop:  # a chain with the prompt may end the answer
                stretch = next(at for at in count() if at not in self.members)
                self.cache.make_room(member.cache.length, self.executor.most)
                self.cache.take(stretch, member.cache)
                self.members[stretch] = member
                failed.pop_all()
        member.out.prefill_s = time.perf_counter() - start
        return member

    def close(self) -> None:
        for member in self.members.values():
            member.session.close()
        self.members.clear()
        self.target.idle_batch = self.cache

    def step(self) -> list[Decoding]:
        members = list(self.members.values())
        start = time.perf_counter()
        executions = [member.request.execution for member in members]
        execution = next((name for name in executions if name != "eager"), "eager")
        if self.executor.execution != execution:
            self.executor = Executor.of(self.target, self.cache, self.drafter, execution)
        self.executor.set_rule([member.request.sampling for member in members])
        setup_s = self.take()
        share = (time.perf_counter() - start - setup_s) / len(members)
        for member in members:
            if len(member.out.steps) == 1:
                member.out.prefill_s += share
            else:
                member.out.decode_s += share
        for at, member in list(self.members.items()):
            if member.out.stop:
                self.members.pop(at).session.close()
        return members


def decode_batch(
    target: Target, drafter: Drafter, prompts: Iterable[tuple[list[int], Request]], size: int
) -> Generator[tuple[int, Generation], None, list[Generation]]:
    """Decode prompts, `size` of them at a time. Each text is that of `decode`.

    Sequences that began together cannot learn from each other's past, so fewer drafts are accepted.

    Args:
        prompts: with their requests; the next one is read when there is a place for it.

    Yields:
        After each step of a sequence, its prompt's index and its answer so far.

    Raises:
        UserError: a prompt or request that does not fit, or a model that cannot decode batches.
    """
    if not isinstance(size, int) or size < 1:
        raise UserError(f"batch={size}: must be a number of sequences, at least 1")
    waiting = iter(prompts)
    outs = list[Generation]()
    with target.turns:
        batch = Batch(target, drafter, size)
    try:
        while True:
            following = next(waiting, None) if len(batch.members) < size else None
            if following is None and not batch.members:
                return outs
            with target.turns, torch.inference_mode():
                stepped = (
                    batch.step() if following is None else [batch.begin(len(outs), *following)]
                )
            if following is not None:
                outs.append(stepped[0].out)
            yield from ((member.number, member.out) for member in stepped if member.out.steps)
    finally:
        with target.turns:
            batch.close()


@torch.inference_mode()
def check_batch(target: Target, execution: str = "eager") -> None:
    """Refuse a model whose logits in a batch are not those of each text alone."""
    if target.no_fixed_shapes:
        raise UserError(
            f"{target.name}: {target.no_fixed_shapes}; decode its prompts one by one, without a"
            " batch"
        )
    if execution in target.batches or target.context < 2:
        return
    try:
        _try_batch(target, execution)
    except UserError:
        if not target.attends_by_table:
            raise
        target.attends_by_table = False  # masks serve attention that adds to its mask
        _try_batch(target, execution)
    target.batches.add(execution)


def _try_batch(target: Target, execution: str) -> None:
    half = min(TRIAL, target.context) // 2
    ids = torch.tensor([(3 + 7 * i) % min(97, target.vocab_size) for i in range(4 * half)]).view(
        2, -1
    )
    cache = target.caches.make(2 * ROOM, stretches=2)
    chain = Tree.chain(half - 1)
    plain = DeviceDrafter(target.device)
    target.refresh()  # the trial's rows may use them
    with refusing_errors(target.name):
        executor = Executor(target, plain.device, execution)
        executor.choice = None  # the logits are wanted
        cache.cursor.ahead = executor.most + PAST_END  # finds attention that counts columns
        first = {1: Draft(chain, ids[0, :half]), 0: Draft(chain, ids[1, :half])}
        executor.forward(cache, first, plain)
        cache.commit(range(half), range(half))
        rest = {0: Draft(chain, ids[1, half:]), 1: Draft(chain, ids[0, half:])}
        rows: list[Any] = [part.logits for part in executor.forward(cache, rest, plain)]
        check_error(target, torch.stack(rows), ids.flip(0).to(target.device), "a batch's rows")
