"""Batches: several sequences in one forward, each with the text that it has alone.

All sequences live in one cache, each in a stretch of columns of its own. A forward takes the drafts
of all sequences as its rows, and a row sees its own sequence's committed columns and its own
ancestors. Accepted nodes move to the end of their sequence's committed columns. A sequence that
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

from ..errors import UserError
from .answer import Decoding, Generation, Request
from .cache import TreeCache
from .checks import PAST_END, TRIAL, check_error, refusing_errors
from .drafter import DeviceDrafter, Drafter
from .loop import first_forward, open_sequence
from .sampling import GREEDY
from .sight import ALIGNED
from .static_step import ROWS, Forwarded
from .step import Executor, Steps, rows_of
from .target import Target
from .tree import Draft, Tree
from .verification import Verification

ROOM = 512  # columns of a stretch at first


class SharedCache:
    """A cache with a stretch of columns for each sequence of a batch. The stretches are equally
    long and grow together.

    Args:
        size: S, the number of sequences.

    Attributes:
        lengths: of each stretch, its committed columns.
    """

    def __init__(self, target: Target, size: int) -> None:
        self.most = target.context + 2 * ROWS[-1]  # columns of a context, a draft, unused rows
        self.cache: TreeCache = target.caches.make(size * ROOM, stretches=size)
        self.cache.length = self.cache.capacity
        self.lengths = [0] * size

    @property
    def room(self) -> int:
        """Columns of a stretch."""
        return self.cache.capacity // self.cache.stretches

    def make_room(self, columns: int) -> None:
        """Make room for so many columns in each stretch."""
        if columns > self.room:
            size = self.cache.stretches
            room = max(columns, min(2 * self.room, self.most))
            self.cache.make_room(size * -(-room // ALIGNED) * ALIGNED)
            self.cache.length = self.cache.capacity

    def take(self, stretch: int, other: TreeCache) -> None:
        """Copy a sequence's committed tokens from a cache of its own."""
        self.make_room(other.length)
        self.cache.copy_from(other, stretch * self.room)
        self.lengths[stretch] = other.length

    def forward(
        self,
        executor: Executor,
        drafts: dict[int, Draft],
        drafter: Drafter,
    ) -> list[Forwarded]:
        """Forward drafts of several sequences and return the outputs of each; static steps round
        the number of rows up to a few shapes.

        Args:
            drafts: by stretch.
            drafter: the drafter of all drafts.
        """
        columns = [self.lengths[at] + len(draft.tree) for at, draft in drafts.items()]
        n = sum(len(draft.tree) for draft in drafts.values())
        rows = n if executor.execution == "eager" else rows_of(n)
        columns[-1] += rows - n  # unused rows
        self.make_room(max(columns))
        stretches = [(at * self.room, self.lengths[at]) for at in drafts]
        return executor.forward(self.cache, list(drafts.values()), stretches, drafter, rows)

    def commit(self, paths: dict[int, list[int]]) -> None:
        """Keep the accepted nodes of each stretch's last draft, root first."""
        source = list[int]()
        to = list[int]()
        for stretch, path in paths.items():
            first = stretch * self.room + self.lengths[stretch]
            moved = [(node, i) for i, node in enumerate(path) if node != i]
            source += [first + node for node, _ in moved]
            to += [first + i for _, i in moved]
            self.lengths[stretch] += len(path)
        if source:
            self.cache.move(torch.tensor(source), torch.tensor(to))


class Batch(Steps):
    """The sequences that are being decoded together, in the order in which they began. They learn
    in this order.

    Attributes:
        members: the sequences, by stretch.
    """

    def __init__(self, target: Target, drafter: Drafter, size: int) -> None:
        self.target = target
        self.drafter = drafter
        self.members = dict[int, Decoding]()
        # the last batch's, with its captured steps
        idle = target.idle_batch
        target.idle_batch = None
        fits = idle is not None and idle.cache.stretches == size
        self.cache = idle if fits else SharedCache(target, size)
        self.executor = Executor(target, drafter.device)

    def begin(self, number: int, prompt: list[int], request: Request) -> Decoding:
        """Begin a sequence. Its prompt is forwarded alone, and its states are copied into the
        shared cache.

        If its session begins with a chain, the member has a first step. It leaves the batch if this
        ends the answer.
        """
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
            if not member.out.stop:
                stretch = next(at for at in count() if at not in self.members)
                self.cache.take(stretch, member.cache)
                self.members[stretch] = member
                failed.pop_all()
        member.out.prefill_s = time.perf_counter() - start
        return member

    def close(self) -> None:
        """End all members, and keep the cache for the next batch."""
        for member in self.members.values():
            member.session.close()
        self.members.clear()
        self.target.idle_batch = self.cache

    def step(self) -> list[Decoding]:
        """Take a step of all members. Returns them."""
        members = list(self.members.values())
        start = time.perf_counter()
        executions = [member.request.execution for member in members]
        execution = next((name for name in executions if name != "eager"), "eager")
        if self.executor.execution != execution:
            self.executor = Executor.of(
                self.target, self.cache.cache, self.drafter, GREEDY, execution
            )
        setup_s = self.take(members)
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

    def commit(self, verifications: list[Verification]) -> None:
        paths = [step.path[: len(step.tokens)] for step in verifications]
        self.cache.commit(dict(zip(self.members, paths, strict=True)))

    def forward(self, drafts: list[Draft], drafter: Drafter) -> list[Forwarded]:
        executor = self.executor
        greedy = all(member.session.choice.greedy for member in self.members.values())
        executor.choice = executor.choices[GREEDY] if greedy else None
        return self.cache.forward(executor, dict(zip(self.members, drafts, strict=True)), drafter)


def decode_batch(
    target: Target, drafter: Drafter, asked: Iterable[tuple[list[int], Request]], size: int
) -> Generator[tuple[int, Generation], None, list[Generation]]:
    """Decode prompts, `size` of them at a time; where one ends the next one begins. Each text is
    that of `decode`.

    Sequences that began together cannot learn from each other's past, so fewer drafts are accepted
    than one by one.

    Args:
        asked: prompts and their requests; the next one is read when there is a place for it.

    Yields:
        After each step of a sequence its prompt's index and its answer so far, whose `stop` is set
        once it ended.

    Returns:
        All answers.

    Raises:
        UserError: a prompt or request that does not fit, or a model that cannot decode batches;
            says why.
    """
    if not isinstance(size, int) or size < 1:
        raise UserError(f"batch={size}: must be a number of sequences, at least 1")
    waiting = iter(asked)
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
    """Refuse a model that cannot decode batches: by rules, then by a trial of two texts in two
    steps, whose logits must be those of each text alone.

    If a table fails the trial, as of attention that adds to its mask, masks are tried.
    """
    if not target.has_fixed_shapes:
        why = "keeps recurrent states" if target.recurrent else "is spread over several devices"
        raise UserError(f"{target.name}: {why}; decode its prompts one by one, without a batch")
    if execution in target.batches or target.context < 2:
        return
    try:
        _try_batch(target, execution)
    except UserError:
        if not target.attends_by_table:
            raise
        target.attends_by_table = False
        _try_batch(target, execution)
    target.batches.add(execution)


def _try_batch(target: Target, execution: str) -> None:
    """Forward two texts in two steps; raise UserError if their logits are not those of each text
    alone.
    """
    half = min(TRIAL, target.context) // 2
    ids = torch.tensor([(3 + 7 * i) % min(97, target.vocab_size) for i in range(4 * half)]).view(
        2, -1
    )
    shared = SharedCache(target, 2)
    chain = Tree.chain(half - 1)
    plain = DeviceDrafter(target.device)
    shared.cache.cursor.ahead = shared.most + PAST_END  # finds attention that counts columns
    target.refresh()  # the trial's rows may use them
    with refusing_errors(target.name):
        executor = Executor(target, plain.device, execution)
        executor.choice = None  # the logits are wanted
        first = {1: Draft(chain, ids[0, :half]), 0: Draft(chain, ids[1, :half])}
        shared.forward(executor, first, plain)
        shared.commit({0: [*range(half)], 1: [*range(half)]})
        rest = {0: Draft(chain, ids[1, half:]), 1: Draft(chain, ids[0, half:])}
        rows: list[Any] = [part.logits for part in shared.forward(executor, rest, plain)]
        check_error(target, torch.stack(rows), ids.flip(0).to(target.device), "a batch's rows")
