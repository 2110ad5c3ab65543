"""Static steps have a fixed shape and run on the device, so that each can be captured as one CUDA graph and replayed.

A DeviceDrafter's whole step is static (`StaticStep`). For other drafters, the forward and the target's choices are
static (`StaticForward`): drafts of any tree are padded and fed in. For a batch, only the forward is (`BatchForward`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .cache import TreeCache
from .devices import on_host_like, synchronize
from .drafter import DeviceDrafter, Drafter
from .kernels import blocked
from .sampling import Candidates, Choice, argmax, candidates_of
from .target import Hidden, Outputs, Target
from .tree import Draft, Tree
from .verification import Commit

Array = NDArray[np.integer[Any]]
Rows = tuple[int, int, Draft]  # the owner of a draft, the position of its root, and the draft
FREE, WARM_UP, NOBODY = -1, -2, -3  # owners of free columns, of column 0, of unused rows
WORD = 64  # bits of an int64, in which a tree is packed
BUCKET = 256  # a static step attends over the context, rounded up to a multiple of this; see `bucket_of`
# Rows of a StaticForward: the smallest of these that holds the draft, so that a few forwards serve all drafts.
ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def bucket_of(tokens: int) -> int:
    """Return the bucket that holds so many tokens: multiples of BUCKET up to 4 of them, then 6, 8, 12, 16, ...

    So a context of 4,096 has 8 buckets, not 16, and at most a third of a bucket is read in vain.
    """
    buckets = -(-tokens // BUCKET)
    if buckets > 4:
        part = 1 << (buckets - 1).bit_length() - 2
        buckets = -(-buckets // part) * part
    return buckets * BUCKET


class Setup(NamedTuple):
    """Arguments with which a static step is made."""

    target: Target
    cache: TreeCache  # not kept alive, as a larger one may replace it
    bucket: int  # visible positions of the cache; at least its length and the nodes of the step
    choice: Choice  # the target's rule


class TreeForward:
    """Forwards drafts of up to n nodes over one bucket of the cache, with the same shapes every time.

    Position in the cache and tree are tensors on the device. Unused nodes attend to the committed tokens and
    themselves; no node attends to them.

    Args:
        length: int64 (), the committed tokens; filled by the caller.
        hidden: also return these hidden states.
    """

    def __init__(self, setup: Setup, nodes: int, length: torch.Tensor, *, hidden: Hidden) -> None:
        self.target, cache, self.bucket, _ = setup
        self._cache, self.length, self._hidden = weakref.ref(cache), length, hidden
        device, dtype = self.target.device, self.target.dtype
        self.depths = torch.zeros(nodes, dtype=torch.long, device=device)
        self._nodes = torch.arange(nodes, device=device)
        self._columns = torch.arange(self.bucket, device=device)
        self._word, self._bit = self._nodes // WORD, self._nodes % WORD  # a node's place in packed rows
        self._blocked = blocked(dtype)
        # (n, n + 2): the tree's own mask between a column that all attend to and one that none does
        self._mask = torch.full((nodes, nodes + 2), self._blocked, dtype=dtype, device=device)
        self._mask[:, 0] = 0

    def set_tree(self, depths: torch.Tensor, words: torch.Tensor) -> None:
        """Forward this tree from now on: depths int64 (n,), and ancestors (n, ceil(n / 64)) as made by `packed`.

        Unused nodes have depth 0 and attend to themselves.
        """
        self.depths.copy_(depths)
        visible = unpacked(words, self._word, self._bit)  # (n, n)
        self._mask[:, 1:-1].fill_(self._blocked).masked_fill_(visible, 0)

    def __call__(self, tokens: torch.Tensor) -> Outputs:
        """Forward token ids (n,). Reads no host value; all shapes are fixed."""
        cache = self._cache()
        assert cache is not None
        # mask column of each cache column: 0 if committed, 1 to n for the tree's nodes, n + 1 after them
        node = (self._columns - self.length + 1).clamp(0, len(self._nodes) + 1)  # (bucket,)
        return self.target.forward_static(
            cache,
            tokens,
            self._mask.index_select(1, node),  # (n, bucket)
            self.depths + self.length,
            self._nodes + self.length,
            hidden=self._hidden,
        )


def packed(ancestors: torch.Tensor, n: int) -> torch.Tensor:
    """Pack bool (m, m) -> int64 (n, ceil(n / 64)) on the host: column j is bit j % WORD of word j // WORD.

    Nodes from m on see only themselves. NumPy takes a tenth of torch's time, and a tree of one step is on the host.
    """
    seen = np.eye(n, -(-n // WORD) * WORD, dtype=bool)
    m = len(ancestors)
    seen[:m, :m] = ancestors.cpu().numpy()
    return torch.from_numpy(np.packbits(seen, axis=1, bitorder="little").view(np.int64))


def unpacked(words: torch.Tensor, word: torch.Tensor, bit: torch.Tensor) -> torch.Tensor:
    """Unpack int64 (n, ceil(n / 64)), made by `packed`, -> bool (n, n), on the device.

    Args:
        word, bit: int64 (n,), where node j's bit is: j // WORD and j % WORD.
    """
    return (words.index_select(1, word) >> bit & 1).bool()


class StaticStep:
    """The step of one tree over one bucket of the cache. `run` reads and writes buffers that are never reallocated."""

    def __init__(self, setup: Setup, drafter: DeviceDrafter, tree: Tree) -> None:
        self.target, self.choice, self._cache = setup.target, setup.choice, weakref.ref(setup.cache)
        # the drafter owns its steps: a cycle would keep its tensors until it is collected
        self.drafter, self.tree = weakref.proxy(drafter), tree
        self.length = torch.zeros((), dtype=torch.long, device=self.target.device)
        self.forward = TreeForward(setup, len(tree), self.length, hidden=drafter.needs.hidden)
        self.forward.set_tree(tree.depths, packed(tree.host_ancestors, len(tree)).to(tree.device))
        self.commit = Commit(tree, self.length)
        self.root, self._k = self.commit.root, drafter.needs.candidates
        self._depths = torch.arange(tree.max_depth + 1, device=self.target.device)
        self.tokens = self.choices = torch.zeros(len(tree), dtype=torch.long, device=self.target.device)

    def run(self) -> None:
        commit, cache = self.commit, self._cache()
        assert cache is not None
        with self.target.drafting():
            tokens = self.drafter.grow(self.root)  # (n,)
        logits, hidden = self.forward(tokens)
        positions = self._depths + self.length + 1 if self.choice.draws else None
        choices = self.choice.among(logits, positions, self.forward.depths)  # (n,)
        candidates, _ = candidates_of(logits, self._k)  # (n, k)
        commit(tokens, choices)
        if not self.tree.is_chain:  # a chain's accepted nodes stay where they are
            cache.move(commit.source, commit.to)
        if candidates is not None:
            self.drafter.learn(tokens, candidates, commit.accepted)
        if hidden is not None:
            self.drafter.set_hidden(hidden.index_select(0, commit.report[:1]))
        self.tokens, self.choices = tokens, choices  # to be read before the next step overwrites them

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a run writes and that outlive it."""
        written: dict[str, torch.Tensor] = self.drafter.step_state()  # a proxy has no types
        return written


class StaticForward:
    """A forward over one bucket of the cache with the target's choices, for drafts of up to n nodes.

    Attributes, of the last run:
        choices: int64 (n,).
        logits: (n, V), if the drafter reads them.
        hidden: (n, w H), if the drafter reads them.
    """

    def __init__(self, setup: Setup, drafter: Drafter, nodes: int) -> None:
        self.target, self.choice, self._n, self._needs = setup.target, setup.choice, nodes, drafter.needs
        k, columns = drafter.needs.candidates, 1 + drafter.needs.log_probs
        # One buffer goes in: length, tokens, depths, ancestors as `packed` has them. One comes out: see `run`.
        self._sizes = [1, nodes, nodes, nodes * -(-nodes // WORD)]
        self._input = torch.zeros(sum(self._sizes), dtype=torch.long, device=self.target.device)
        length, self._tokens, self._depths, words = torch.split(self._input, self._sizes)
        self.length, self._words = length[0], words.view(nodes, -1)
        self._host = on_host_like(self._input)
        self._host_report = on_host_like(self._input.new_zeros(nodes, 1 + k * columns))
        self.forward = TreeForward(setup, nodes, self.length, hidden=drafter.needs.hidden)
        self._words.copy_(packed(torch.ones(1, 1, dtype=torch.bool), nodes))  # for warm-up runs, before the first draft
        self._report = self.choices = self._tokens
        self.logits: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None
        self._candidates: Candidates = None, None

    def feed(self, draft: Draft, length: int) -> None:
        """Write the next run's draft and length. Unused nodes hold any tokens.

        The input buffer is free: the last run's report has been read, so that run has read its input.
        """
        tree, n = draft.tree, len(draft.tree)
        host_length, tokens, depths, words = torch.split(self._host, self._sizes)
        host_length.fill_(length)
        depths.zero_()
        depths[:n] = torch.from_numpy(np.array(tree.depth_of))
        words.view(self._n, -1).copy_(packed(tree.host_ancestors, self._n))
        if draft.tokens.device.type == "cpu":
            tokens[:n] = draft.tokens
        self._input.copy_(self._host, non_blocking=True)
        if draft.tokens.device.type != "cpu":  # drafted on the device: copied without waiting
            self._tokens[:n].copy_(draft.tokens)

    def run(self) -> None:
        self.forward.set_tree(self._depths, self._words)
        needs, (logits, self.hidden) = self._needs, self.forward(self._tokens)
        self.logits = logits if needs.logits else None  # a graph would keep them in memory for good
        positions = self._depths + self.length + 1 if self.choice.draws else None  # (n,)
        self.choices = self.choice.among(logits, positions)
        self._candidates = candidates_of(logits, needs.candidates, needs.log_probs)
        candidates, log_probs = self._candidates
        parts = self.choices[:, None], candidates, None if log_probs is None else log_probs.double().view(torch.long)
        self._report = torch.cat([part for part in parts if part is not None], 1)  # int64 (n, 1 + k + k)

    def read(self, n: int) -> tuple[torch.Tensor, Candidates]:
        """Return choices (n,) and candidates of the first n nodes on the host, with one transfer."""
        self._host_report.copy_(self._report, non_blocking=True)
        synchronize(self._report.device)
        k = self._needs.candidates
        choices, candidates, log_probs = self._host_report[:n].clone().tensor_split((1, 1 + k), 1)
        return choices[:, 0], (
            candidates if k else None,
            log_probs.view(torch.double).float() if self._needs.log_probs else None,
        )

    def on_device(self, n: int) -> tuple[torch.Tensor, Candidates]:
        """Return choices and candidates as `read` does, but on the device and without a transfer."""
        candidates, log_probs = (None if part is None else part[:n] for part in self._candidates)
        return self.choices[:n], (candidates, log_probs)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a run writes and that outlive it."""
        return {}


class BatchForward:
    """Forwards up to n rows of several sequences over the first columns of a cache, always with the same shapes.

    All inputs are in one buffer that is never reallocated: token, owner, position and column of each row, owner and
    position of each column, and the rows' packed ancestors. Unused rows belong to no sequence. Warm-up runs, before the
    first `feed`, write only to column 0.

    Args:
        shape: n, and whether all sequences are greedy.

    Attributes, of the last run:
        choices, candidates: of n rows, if all sequences are greedy.
        logits: (n, V), if a sequence is not greedy, or the drafter reads them.
        hidden: (n, w H), if the drafter reads them.
    """

    def __init__(self, setup: Setup, drafter: Drafter, shape: tuple[int, bool]) -> None:
        (self.target, cache, self.width, self.choice), (rows, self.greedy) = setup, shape
        self._cache, self.rows, self._needs = weakref.ref(cache), rows, drafter.needs
        self._sizes = [rows] * 4 + [self.width] * 2 + [rows * -(-rows // WORD)]
        device = self.target.device
        self.input = torch.zeros(sum(self._sizes), dtype=torch.long, device=device)
        self._host = on_host_like(self.input)
        *_, words = torch.split(self.input, self._sizes)
        words.view(rows, -1).copy_(packed(torch.ones(1, 1, dtype=torch.bool), rows))  # for warm-up runs
        nodes = torch.arange(rows, device=device)
        self._word, self._bit = nodes // WORD, nodes % WORD
        self.length = torch.zeros((), dtype=torch.long, device=device)  # an executor sets it; batches ignore it
        self.choices: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None
        self.candidates: Candidates = None, None

    def feed(self, drafts: Sequence[Rows], columns: Array, owners: Array, positions: Array) -> None:
        """Write the next run's rows.

        Args:
            columns: (n,), where each of the n rows is written; unused ones come last.
            owners, positions: (c,), of the cache's columns; the rows' columns already have the rows' positions.
        """
        counts = [len(draft.tree) for _, _, draft in drafts]
        n, seen = sum(counts), np.eye(self.rows, dtype=bool)
        for at, (_, _, draft) in zip(np.cumsum([0, *counts[:-1]]), drafts, strict=True):
            seen[at : at + len(draft.tree), at : at + len(draft.tree)] = draft.tree.host_ancestors.numpy()
        parts = torch.split(self._host, self._sizes)
        tokens, of_rows, at, written, of_columns, column_positions, words = (part.numpy() for part in parts)
        of_rows[:n], of_rows[n:] = np.repeat([owner for owner, _, _ in drafts], counts), NOBODY
        at[:], written[:] = positions[columns], columns
        of_columns[:], column_positions[:] = owners[: self.width], positions[: self.width]
        words[:] = packed(torch.from_numpy(seen), self.rows).view(-1)
        drafted, tokens[n:] = [draft.tokens for _, _, draft in drafts], 0
        on_host = all(part.device.type == "cpu" for part in drafted)
        if on_host:
            tokens[:n] = torch.cat(drafted)
        self.input.copy_(self._host, non_blocking=True)
        if not on_host:  # drafted on the device: copied without waiting; a method may draft on either
            self.input[:n].copy_(torch.cat([part.to(self.input.device) for part in drafted]))

    def run(self) -> None:
        """Forward. Reads no host value."""
        target, cache, needs = self.target, self._cache(), self._needs
        assert cache is not None
        tokens, owners, positions, at, of_columns, column_positions, words = torch.split(self.input, self._sizes)
        seen = unpacked(words.view(self.rows, -1), self._word, self._bit)  # (n, n)
        visible = (owners[:, None] == of_columns).index_copy_(1, at, seen)  # (n, w)
        mask = torch.zeros(visible.shape, dtype=target.dtype, device=target.device)
        mask.masked_fill_(~visible, blocked(target.dtype))
        logits, self.hidden = target.forward_static(
            cache, tokens, mask, positions, at, columns=column_positions, hidden=needs.hidden
        )
        self.logits = logits if needs.logits or not self.greedy else None  # a graph would keep them in memory for good
        if self.greedy:
            self.choices, self.candidates = argmax(logits), candidates_of(logits, needs.candidates, needs.log_probs)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a run writes and that outlive it."""
        return {}
