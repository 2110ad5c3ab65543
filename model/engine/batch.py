"""Batches: several sequences in one forward, each with the text that it has alone.

All sequences live in one cache. A column of it holds one token's states: of one sequence, at one position. A forward
takes the drafts of all sequences as its rows, and a row sees its own sequence's columns and its own ancestors. Accepted
nodes stay in the columns where they were written; the columns of rejected nodes are free again. A sequence that ends
frees its columns, and the next prompt takes its place. Nothing is padded, and no step moves anything.
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
from .devices import without_cudnn
from .drafter import DeviceDrafter, Drafter, Session
from .loop import ROOM, Generation, Request, first_forward, open_sequence, step_clock
from .sampling import Choice, Sampling
from .step import Forwarded, Sequence, conclude
from .target import Hidden, Outputs, Target
from .tree import Draft, Tree
from .verification import Verification

FREE = -1  # owner of a free column
Rows = tuple[int, int, Draft]  # the owner of a draft, the position of its root, and the draft


class SharedCache:
    """A cache whose columns belong to several sequences.

    Args:
        most: columns that it may ever need.

    Attributes:
        owners: int32 (c,), the number of the sequence that a column belongs to, or FREE.
        positions: int64 (c,), of the column's token in its text.
    """

    def __init__(self, target: Target, most: int) -> None:
        self.target, self.most = target, most
        self.cache: TreeCache = target.caches.make(ROOM)
        self.owners, self.positions = np.full(ROOM, FREE, dtype=np.int32), np.zeros(ROOM, dtype=np.int64)

    def free(self, count: int) -> NDArray[np.int64]:
        """Return the first so many free columns, int64; make room if there are fewer."""
        columns = np.flatnonzero(self.owners == FREE)
        if len(columns) < count:
            self.cache.make_room(len(self.owners) + count - len(columns), self.most)
            more = self.cache.capacity - len(self.owners)
            self.owners = np.pad(self.owners, (0, more), constant_values=FREE)
            self.positions = np.pad(self.positions, (0, more))
            columns = np.flatnonzero(self.owners == FREE)
        return columns[:count]

    def release(self, owner: int) -> None:
        """Free a sequence's columns."""
        self.owners[self.owners == owner] = FREE

    def take(self, owner: int, other: TreeCache) -> None:
        """Copy what a sequence has committed in a cache of its own."""
        columns = self.free(other.length)
        self.cache.copy_from(other, torch.from_numpy(columns))
        self.owners[columns], self.positions[columns] = owner, np.arange(other.length)
        self.cache.length = max(self.cache.length, 1 + int(columns.max(initial=-1)))

    def forward(self, drafts: list[Rows], hidden: Hidden = ()) -> list[tuple[Outputs, NDArray[np.int64]]]:
        """Forward drafts of several sequences. Returns each draft's outputs and columns, of which none is owned yet."""
        counts = [len(draft.tree) for _, _, draft in drafts]
        columns = self.free(sum(counts))
        self.positions[columns] = np.concatenate([root + np.array(draft.tree.depth_of) for _, root, draft in drafts])
        self.cache.length = 1 + int(max(columns[-1], np.flatnonzero(self.owners != FREE).max(initial=-1)))
        width = -(-self.cache.length // ALIGNED) * ALIGNED
        visible = np.repeat([owner for owner, _, _ in drafts], counts)[:, None] == self.owners[:width]  # (n, width)
        parts = np.split(columns, np.cumsum(counts)[:-1])
        for part, of_draft, (_, _, draft) in zip(parts, np.split(visible, np.cumsum(counts)[:-1]), drafts, strict=True):
            of_draft[:, part] = draft.tree.host_ancestors.numpy()
        target, device = self.target, self.target.device
        mask = torch.zeros(visible.shape, dtype=target.dtype, device=device)
        logits, states = target.forward_static(
            self.cache,
            torch.cat([draft.tokens.to(device) for _, _, draft in drafts]),
            mask.masked_fill_(torch.from_numpy(~visible).to(device), torch.finfo(target.dtype).min),
            torch.from_numpy(self.positions[columns]).to(device),
            torch.from_numpy(columns).to(device),
            columns=torch.from_numpy(self.positions[:width]).to(device),
            hidden=hidden,
        )
        of_drafts = [None] * len(drafts) if states is None else torch.split(states, counts)
        return list(zip(map(Outputs, torch.split(logits, counts), of_drafts), parts, strict=True))


@dataclass(eq=False)
class Member:
    """A sequence of a batch; `number` is its prompt's."""

    number: int
    session: Session
    request: Request
    choice: Choice
    out: Generation = field(default_factory=Generation)
    start: float = field(default_factory=time.perf_counter)
    sequence: Sequence = field(init=False)

    def add(self, verification: Verification) -> bool:
        """Add a step. Returns True if the answer goes on."""
        out, sequence, request = self.out, self.sequence, self.request
        limit = len(out.tokens) + sequence.left
        goes_on = out.add(verification, limit, request.eos) and not sequence.ended
        sequence.text += verification.tokens
        out.ends_s.append(time.perf_counter() - self.start)
        out.prefill_s = out.ends_s[0]
        if not goes_on:
            out.decode_s = out.ends_s[-1] - out.prefill_s
            out.end(limit, request.max_new_tokens, request.eos, sequence.ended)
        return goes_on


class Batch:
    """The sequences that are being decoded together, in the order in which they began: so they learn, too."""

    def __init__(self, target: Target, drafter: Drafter, size: int) -> None:
        self.target, self.drafter, self.members = target, drafter, list[Member]()
        self.cache = SharedCache(target, size * (target.context + drafter.max_nodes))
        self._plain = DeviceDrafter(target.device).session()
        self._choices: dict[Sampling, Choice] = {}  # by settings, without seed and processors: they share noise
        self._clock = step_clock(target)

    def begin(self, number: int, prompt: list[int], request: Request) -> Member:
        """Begin a sequence. Its prompt is forwarded alone, and its states are copied into the shared cache.

        The member has a first step if its session began with a chain, and no place in the batch if that ended it.
        """
        if request.execution != "eager":
            raise UserError(f"execution={request.execution}: steps of a batch are eager; use eager or auto")
        choice = Choice(rule := replace(request.sampling, seed=0), self.target.device)
        if not rule.processors:
            choice = self._choices.setdefault(rule, choice)
        member = Member(number, self.drafter.session(), request, choice)
        self.members.append(member)  # now it is closed, whatever happens
        member.session.choice = choice
        choice.set_seed(request.sampling.seed)
        with ExitStack() as ends:
            member.sequence = open_sequence(self.target, member.session, prompt, request, member.out, ends)
            verification = first_forward(member.sequence, choice, member.out)
            if verification is not None and not member.add(verification):
                self.end(member)
            else:
                self.cache.take(number, member.sequence.cache)
        return member

    def end(self, member: Member) -> None:
        """Close a member's session and free its columns."""
        self.members.remove(member)
        self.cache.release(member.number)
        member.session.close()

    def step(self) -> list[Member]:
        """Take a step of all members. Returns them."""
        sizing, members, start = self.drafter.sizing, list(self.members), self._clock()
        is_plain = sizing is not None and sizing.begin_step(len(members))
        sessions = [self._plain if is_plain else member.session for member in members]
        drafts = [self._draft(member, session) for member, session in zip(members, sessions, strict=True)]
        forwarded = self.cache.forward(drafts, self.drafter.needs.hidden)
        for member, session, (_, _, draft), (outputs, columns) in zip(
            members, sessions, drafts, forwarded, strict=True
        ):
            sequence, every = member.sequence, session.drafter.needs.choices
            member.choice.set_seed(sequence.sampling.seed)
            choices = member.choice.after(outputs.logits, draft, sequence.text, every=every, over=sequence.over)
            verification = conclude(session, draft, Forwarded(choices, *outputs), over=sequence.over)
            self.cache.owners[columns[verification.path[: len(verification.tokens)]]] = member.number
            if is_plain:
                member.session.skip(verification.tokens)
            if not member.add(verification):
                self.end(member)
        seconds = self._clock() - start
        if sizing is not None and seconds > 0:
            nodes, tokens = (
                sum(counts) / len(members)
                for counts in zip(
                    *((m.out.steps[-1].nodes - 1, m.out.steps[-1].accepted) for m in members), strict=True
                )
            )
            sizing.observe(min(sizing.sizes, key=lambda size: abs(size - nodes)), tokens, seconds)
        return members

    def _draft(self, member: Member, session: Session) -> Rows:
        """Return a draft with tokens of its own, as a drafter may write the next draft into the same tensor."""
        text = member.sequence.text
        member.choice.set_seed(member.sequence.sampling.seed)
        with without_cudnn(self.target.device):
            draft = session.draft(text[-1])
        return member.number, len(text) - 1, Draft(draft.tree, draft.tokens.clone(), draft.source)


def decode_batch(
    target: Target, drafter: Drafter, asked: Iterable[tuple[list[int], Request]], size: int
) -> Generator[tuple[int, Generation], None, list[Generation]]:
    """Decode prompts, `size` of them at a time; where one ends the next one begins. Each text is that of `decode`.

    Sequences that began together cannot learn from each other's past, so fewer drafts are accepted than one by one.

    Args:
        asked: prompts, and what is asked of each; the next one is read when there is a place for it.

    Yields:
        After each step of a sequence its prompt's index and its answer so far, whose `stop` is set once it ended.

    Returns:
        All answers.

    Raises:
        UserError: a prompt or request that does not fit, or a model that cannot decode batches; says why.
    """
    if not isinstance(size, int) or size < 1:
        raise UserError(f"batch={size}: must be a number of sequences, at least 1")
    batch, waiting, outs = Batch(target, drafter, size), iter(asked), list[Generation]()
    try:
        with target.turns:
            check_batch(target, batch.cache.most)
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
            for member in list(batch.members):
                batch.end(member)


@torch.inference_mode()
def check_batch(target: Target, most: int) -> None:
    """Refuse a model that cannot decode batches: by rules, then by a trial of two texts, whose columns are mixed.

    Args:
        most: columns that a cache may have; attention that counts them differs in the trial.
    """
    if not target.has_fixed_shapes:
        why = "keeps recurrent states" if target.recurrent else "is spread over several devices"
        raise UserError(f"{target.name}: {why}; decode its prompts one by one, without a batch")
    half = min(TRIAL, target.context) // 2
    if most <= target.batch_columns or not half:
        return
    ids = torch.tensor([(3 + 7 * i) % min(97, target.vocab_size) for i in range(4 * half)]).view(2, -1)
    shared, chain = SharedCache(target, most), Tree.chain(half - 1)
    shared.cache.cursor.ahead = most + PAST_END
    # Later tokens lie in front of earlier ones, and no column behind them is free.
    shared.owners[: 2 * half + -4 * half % ALIGNED] = 2
    with refusing_errors(target.name):
        for text, (_, columns) in enumerate(shared.forward([(i, 0, Draft(chain, ids[i, :half])) for i in (0, 1)])):
            shared.owners[columns] = text
        shared.release(2)
        rest = shared.forward([(i, half, Draft(chain, ids[i, half:])) for i in (1, 0)])
        logits = torch.stack([outputs.logits for outputs, _ in rest])
        check_error(target, logits, ids.flip(0).to(target.device), "a batch's rows")
    target.batch_columns = most
