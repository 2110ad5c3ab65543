"""Batches: several sequences in one forward, each with the text that it has alone.

All sequences live in one cache. A column of it holds one token's states: of one sequence, at one position. A forward
takes the drafts of all sequences as its rows, and a row sees its own sequence's columns and its own ancestors. Accepted
nodes stay in the columns where they were written; the columns of rejected nodes are free again. A sequence that ends
frees its columns, and the next prompt takes its place. Nothing is moved, and only static steps are padded.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import UserError
from .cache import ALIGNED, TreeCache
from .checks import PAST_END, TRIAL, check_error, refusing_errors
from .drafter import DeviceDrafter, Drafter, Session
from .loop import ROOM, Generation, Request, first_forward, open_sequence, step_clock
from .sampling import GREEDY, Choice, Sampling
from .static_step import FREE, ROWS, WARM_UP, BatchForward, Rows, Setup
from .step import Executor, Forwarded, Sequence, conclude, unmarked
from .target import Target
from .tree import Draft, Tree
from .verification import Verification


class SharedCache:
    """A cache whose columns belong to several sequences.

    Args:
        max_columns: maximum number of columns.

    Attributes:
        owners: int32 (c,), the number of the sequence that a column belongs to, or FREE.
        positions: int64 (c,), of the column's token in its text.
    """

    def __init__(self, target: Target, max_columns: int) -> None:
        self.max_columns = max_columns
        self.cache: TreeCache = target.caches.make(ROOM)
        self.owners, self.positions = np.full(ROOM, FREE, dtype=np.int32), np.zeros(ROOM, dtype=np.int64)
        self.owners[0] = WARM_UP
        self._choice = Choice(GREEDY, target.device)

    def free(self, count: int) -> NDArray[np.int64]:
        """Return the first `count` free columns, int64; make room if there are fewer."""
        columns = np.flatnonzero(self.owners == FREE)
        if len(columns) < count:
            self.cache.make_room(len(self.owners) + count - len(columns), self.max_columns)
            more = self.cache.capacity - len(self.owners)
            self.owners = np.pad(self.owners, (0, more), constant_values=FREE)
            self.positions = np.pad(self.positions, (0, more))
            columns = np.flatnonzero(self.owners == FREE)
        return columns[:count]

    def release(self, owner: int) -> None:
        """Free a sequence's columns."""
        self.owners[self.owners == owner] = FREE

    def take(self, owner: int, other: TreeCache) -> None:
        """Copy a sequence's committed tokens from a cache of its own."""
        columns = self.free(other.length)
        self.cache.copy_from(other, torch.from_numpy(columns))
        self.owners[columns], self.positions[columns] = owner, np.arange(other.length)
        self.cache.length = max(self.cache.length, 1 + int(columns.max(initial=-1)))

    def forward(
        self,
        target: Target,
        drafts: list[Rows],
        drafter: Drafter,
        session: Session,
        execution: str = "eager",
        greedy: bool = False,
    ) -> tuple[BatchForward, NDArray[np.int64], float]:
        """Forward drafts of several sequences; static steps round the rows and columns up to a few shapes.

        Args:
            drafter: the drafter of all drafts.
            session: the session of one sequence; its drafter keeps the static steps.
            greedy: True if all sequences are greedy.

        Returns:
            The forward; the columns (n,) of the drafts' n rows, which come first and have no owner yet; the seconds
            spent on preparing a new shape.
        """
        n = rows = sum(len(draft.tree) for _, _, draft in drafts)
        if execution != "eager":
            rows = next((size for size in ROWS if size >= n), -(-n // ROWS[-1]) * ROWS[-1])
        columns = self.free(rows)
        self.positions[columns[:n]] = np.concatenate([root + np.array(d.tree.depth_of) for _, root, d in drafts])
        self.cache.length = 1 + int(max(columns[-1], np.flatnonzero(self.owners != FREE).max(initial=-1)))
        shape, setup_s = (rows, greedy), 0.0
        if execution == "eager":
            width = -(-self.cache.length // ALIGNED) * ALIGNED
            forward = BatchForward(Setup(target, self.cache, width, self._choice), drafter, shape)
            launch = forward.run
        else:
            executor = Executor.of(Sequence(target, self.cache, session, [], execution=execution))
            setup_s -= executor.setup_s
            forward, launch = executor.made(BatchForward, drafter, (shape, None), 0, self.cache, unmarked)
            setup_s += executor.setup_s
        forward.feed(drafts, columns, self.owners, self.positions)
        launch()
        return forward, columns[:n], setup_s


@dataclass(eq=False)
class Member:
    """A sequence of a batch; `number` is the index of its prompt."""

    number: int
    session: Session
    request: Request
    choice: Choice
    start: float
    out: Generation = field(default_factory=Generation)
    sequence: Sequence = field(init=False)

    def add(self, verification: Verification, batch: int = 1) -> bool:
        """Add a step, forwarded with so many sequences. Returns True if the answer goes on."""
        out, sequence, request = self.out, self.sequence, self.request
        limit = len(out.tokens) + sequence.left
        goes_on = out.add(verification, limit, request.eos, batch) and not sequence.ended
        sequence.text += verification.tokens
        out.ends_s.append(time.perf_counter() - self.start)
        if not goes_on:
            out.end(limit, request.max_new_tokens, request.eos, sequence.ended)
        return goes_on


class Batch:
    """The sequences that are being decoded together, in the order in which they began. They learn in this order."""

    def __init__(self, target: Target, drafter: Drafter, size: int) -> None:
        self.target, self.drafter, self.members = target, drafter, list[Member]()
        max_columns = size * (target.context + drafter.max_nodes) + ROWS[-1]
        self.cache = target.idle_batch or SharedCache(target, max_columns)  # the last batch's, with its captured steps
        self.cache.max_columns, target.idle_batch = max(self.cache.max_columns, max_columns), None
        self._plain = DeviceDrafter(target.device).session()
        self._choices: dict[Sampling, Choice] = {}  # by settings (seed 0, no processors), to share noise
        self._clock = step_clock(target)

    def begin(self, number: int, prompt: list[int], request: Request) -> Member:
        """Begin a sequence. Its prompt is forwarded alone, and its states are copied into the shared cache.

        If its session begins with a chain, the member has a first step. It leaves the batch if this ends the answer.
        """
        check_batch(self.target, self.cache.max_columns, request.execution)
        choice = Choice(rule := replace(request.sampling, seed=0), self.target.device)
        if not rule.processors:
            choice = self._choices.setdefault(rule, choice)
        member = Member(number, self.drafter.session(), request, choice, start=time.perf_counter())
        self.members.append(member)  # so that it is closed, whatever happens
        self._clock = request.clock or self._clock
        member.session.choice = choice
        choice.set_seed(request.sampling.seed)
        with ExitStack() as ends:
            alone = replace(request, execution="eager")
            member.sequence = open_sequence(self.target, member.session, prompt, alone, member.out, ends)
            verification = first_forward(member.sequence, choice, member.out)
            if verification is not None and not member.add(verification):
                self.end(member)
            else:
                self.cache.take(number, member.sequence.cache)
        member.out.prefill_s = time.perf_counter() - member.start
        return member

    def end(self, member: Member) -> None:
        """Close a member's session and free its columns."""
        self.members.remove(member)
        self.cache.release(member.number)
        member.session.close()

    def close(self) -> None:
        """End all members, and keep the cache for the next batch."""
        for member in list(self.members):
            self.end(member)
        idle = self.target.idle_batch
        if idle is None or idle.cache.capacity <= self.cache.cache.capacity:
            self.target.idle_batch = self.cache

    def step(self) -> list[Member]:
        """Take a step of all members. Returns them."""
        sizing, members = self.drafter.sizing, list(self.members)
        began, start = time.perf_counter(), self._clock()
        is_plain = sizing is not None and sizing.begin_step(len(members))
        sessions = [self._plain if is_plain else member.session for member in members]
        drafts = [self._draft(member, session) for member, session in zip(members, sessions, strict=True)]
        executions = [member.request.execution for member in members]
        execution = next((name for name in executions if name != "eager"), "eager")
        greedy = all(member.choice.greedy for member in members)
        forward, columns, setup_s = self.cache.forward(
            self.target, drafts, sessions[0].drafter, members[0].session, execution, greedy
        )
        chosen = forward.choices, *forward.candidates
        if all(draft.tree.device.type == "cpu" for _, _, draft in drafts):  # one transfer for all
            chosen = tuple(None if part is None else part.cpu() for part in chosen)
        end = 0
        for member, session, (_, _, draft) in zip(members, sessions, drafts, strict=True):
            rows = slice(end, end := end + len(draft.tree))
            member.start += setup_s
            forwarded = self._forwarded(member, session, draft, (forward.logits, forward.hidden, *chosen), rows)
            sequence = member.sequence
            verification = conclude(session, draft, forwarded, over=sequence.over)
            accepted = columns[rows][verification.path[: len(verification.tokens)]]
            self.cache.owners[accepted] = member.number
            sequence.settle(verification.tokens, self.cache.cache, accepted)
            if is_plain:
                member.session.skip(verification.tokens)
            if not member.add(verification, len(members)):
                self.end(member)
        share = (time.perf_counter() - began - setup_s) / len(members)
        for member in members:
            member.out.setup_s += setup_s / len(members)
            if len(member.out.steps) == 1:
                member.out.prefill_s += share
            else:
                member.out.decode_s += share
        seconds = self._clock() - start
        if sizing is not None and seconds > 0 and not setup_s:
            last = [member.out.steps[-1] for member in members]
            nodes = sum(step.nodes - 1 for step in last) / len(last)
            tokens = sum(step.accepted for step in last) / len(last)
            sizing.observe(min(sizing.sizes, key=lambda size: abs(size - nodes)), tokens, seconds)
        return members

    def _forwarded(
        self, member: Member, session: Session, draft: Draft, parts: Iterable[torch.Tensor | None], rows: slice
    ) -> Forwarded:
        """Return a member's rows of logits, hidden states, choices, candidates and their log-probs."""
        logits, hidden, *chosen = (None if part is None else part[rows] for part in parts)
        choices, *candidates = (None if part is None else part.to(draft.tree.device) for part in chosen)
        if choices is not None:
            return Forwarded(choices, logits, hidden, (candidates[0], candidates[1]))
        assert logits is not None
        sequence, every = member.sequence, session.drafter.needs.choices
        member.choice.set_seed(sequence.sampling.seed)
        choices = member.choice.after(logits, draft, sequence.text, every=every, over=sequence.over)
        return Forwarded(choices, logits, hidden)

    def _draft(self, member: Member, session: Session) -> Rows:
        """Return a draft with tokens of its own, as a drafter may write the next draft into the same tensor."""
        text = member.sequence.text
        member.choice.set_seed(member.sequence.sampling.seed)
        with self.target.drafting():
            draft = session.draft(text[-1])
        return member.number, len(text) - 1, Draft(draft.tree, draft.tokens.clone(), draft.source)


def decode_batch(
    target: Target, drafter: Drafter, asked: Iterable[tuple[list[int], Request]], size: int
) -> Generator[tuple[int, Generation], None, list[Generation]]:
    """Decode prompts, `size` of them at a time; where one ends the next one begins. Each text is that of `decode`.

    Sequences that began together cannot learn from each other's past, so fewer drafts are accepted than one by one.

    Args:
        asked: prompts and their requests; the next one is read when there is a place for it.

    Yields:
        After each step of a sequence its prompt's index and its answer so far, whose `stop` is set once it ended.

    Returns:
        All answers.

    Raises:
        UserError: a prompt or request that does not fit, or a model that cannot decode batches; says why.
    """
    if not isinstance(size, int) or size < 1:
        raise UserError(f"batch={size}: must be a number of sequences, at least 1")
    waiting, outs = iter(asked), list[Generation]()
    with target.turns:
        batch = Batch(target, drafter, size)
    try:
        while True:
            following = next(waiting, None) if len(batch.members) < size else None
            if following is None and not batch.members:
                return outs
            with target.turns, torch.inference_mode():
                stepped = batch.step() if following is None else [batch.begin(len(outs), *following)]
            outs += [member.out for member in stepped if following is not None]
            yield from ((member.number, member.out) for member in stepped if member.out.steps)
    finally:
        with target.turns:
            batch.close()


@torch.inference_mode()
def check_batch(target: Target, max_columns: int, execution: str = "eager") -> None:
    """Refuse a model that cannot decode batches: by rules, then by a trial of two texts, whose columns are mixed.

    Args:
        max_columns: maximum columns of a cache; attention that counts columns differs in the trial.
    """
    if not target.has_fixed_shapes:
        why = "keeps recurrent states" if target.recurrent else "is spread over several devices"
        raise UserError(f"{target.name}: {why}; decode its prompts one by one, without a batch")
    half = min(TRIAL, target.context) // 2
    if max_columns <= target.batch_columns.get(execution, 0) or not half:
        return
    ids = torch.tensor([(3 + 7 * i) % min(97, target.vocab_size) for i in range(4 * half)]).view(2, -1)
    shared, chain, plain = SharedCache(target, max_columns), Tree.chain(half - 1), DeviceDrafter(target.device)
    shared.cache.cursor.ahead = max_columns + PAST_END
    # Later tokens lie in columns before earlier ones, and no column after them is free.
    shared.owners[1 : 1 + 2 * half + -(4 * half + 1) % ALIGNED] = 2
    session = plain.session()
    target.copies.refresh(target.model)  # the trial's rows may use them
    with refusing_errors(target.name):
        first = [(i, 0, Draft(chain, ids[i, :half])) for i in (0, 1)]
        shared.owners[shared.forward(target, first, plain, session, execution)[1]] = np.repeat([0, 1], half)
        shared.release(2)
        rest = [(i, half, Draft(chain, ids[i, half:])) for i in (1, 0)]
        logits = shared.forward(target, rest, plain, session, execution)[0].logits
        assert logits is not None
        rows = logits[: 2 * half].view(2, half, -1)
        check_error(target, rows, ids.flip(0).to(target.device), "a batch's rows")
    target.batch_columns[execution] = max_columns
