"""Static steps have a fixed shape and run on the device, so that CUDA graphs can capture them.

A DeviceDrafter's whole step is static (`StaticStep`). For other drafters, the forward and the
target's choices are static (`StaticForward`): drafts are padded and fed in.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...devices import fetch, on_host_like
from ..attention.cache import TreeCache
from ..attention.sight import LENGTH, Sight, fill_table
from ..contract.drafter import DeviceDrafter, Drafter
from ..rule.sampling import Choice, candidates_of
from ..rule.tree import Draft, Tree
from ..rule.verification import Commit
from ..target.target import Target

BUCKET = 256  # columns; static steps under masks attend over some of them (`bucket_of`)
# Rows of a StaticForward: the smallest of these that holds the draft, so that a few forwards serve
# all drafts; 104, 208 and 416 hold 4, 8 and 16 drafts of 24 nodes.
ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 104, 128, 160, 192, 208, 224, 256, 320, 384, 416, 448, 512)


def bucket_of(tokens: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, 16, ... times BUCKET that holds so many tokens."""
    buckets = -(-tokens // BUCKET)
    if buckets > 4:
        part = 1 << (buckets - 1).bit_length() - 2
        buckets = -(-buckets // part) * part
    return buckets * BUCKET


class Setup(NamedTuple):
    target: Target
    cache: TreeCache  # not kept alive, as a larger one may replace it
    # columns of the cache, from the first on, that hold all that the step sees and writes
    bucket: int
    choice: Choice | None  # the target's rule; None: sequences with rules of their own


@dataclass(slots=True)
class Forwarded:
    """The outputs of a forward over n rows, as far as the drafter needs them."""

    # int64 (n,), the target's token after each node; None: to be chosen from logits
    choices: Tensor | None = None
    logits: Tensor | None = None  # (n, V)
    # (m, w H), of the n nodes, preceded by a prompt's own if forwarded with it
    hidden: Tensor | None = None
    # top-k and their log-probs, if the forward computed them already
    candidates: Tensor | None = None
    log_probs: Tensor | None = None
    tokens: Tensor | None = None  # the draft's; then these and the choices are on the host


class StaticStep:
    """The step of one tree over one bucket of the cache. Its buffers are never reallocated.

    Attributes, of the last run:
        tokens, choices: int64 (n,).
    """

    tokens: Tensor
    choices: Tensor

    def __init__(self, setup: Setup, drafter: DeviceDrafter, tree: Tree) -> None:
        assert setup.choice is not None
        self.target = setup.target
        self.choice = setup.choice
        self._cache = weakref.ref(setup.cache)
        # the drafter owns its steps: a cycle would keep its tensors until it is collected
        self.drafter = weakref.proxy(drafter)
        self.tree = tree
        self.length = torch.zeros((), dtype=torch.long, device=self.target.device)
        self._bucket = setup.bucket
        self._nodes = torch.arange(len(tree), device=self.target.device)
        table = np.zeros((len(tree), Sight.width(len(tree))), dtype=np.int64)
        fill_table(table, [tree.host_ancestors.numpy()], [(0, 0)])
        self._sight = Sight(torch.from_numpy(table).to(self.target.device), 1)
        self.commit = Commit(tree, self.length)
        self.root = self.commit.root
        self._k = drafter.needs.candidates
        self._depths = torch.arange(tree.max_depth + 1, device=self.target.device)

    def run(self) -> None:
        commit = self.commit
        cache = self._cache()
        assert cache is not None
        with self.target.drafting():
            tokens = self.drafter.grow(self.root)  # (n,)
        self._sight.table[:, LENGTH] = self.length
        positions = self.tree.depths + self.length
        write_at = self._nodes + self.length
        logits, hidden = self.target.forward_static(
            cache,
            tokens,
            positions,
            write_at,
            self._sight,
            self._bucket,
            hidden=self.drafter.needs.hidden,
        )
        noise_at = self._depths + self.length + 1 if self.choice.draws else None
        choices = self.choice.among(logits, noise_at, self.tree.depths)  # (n,)
        candidates, _ = candidates_of(logits, self._k)  # (n, k)
        commit(tokens, choices)
        if not self.tree.is_chain:  # a chain's accepted nodes stay where they are
            cache.move(commit.source, commit.to)
        if candidates is not None:
            self.drafter.learn(tokens, candidates, commit.accepted)
        if hidden is not None:
            self.drafter.set_hidden(hidden.index_select(0, commit.report[:1]))
        # to be read before the next step overwrites them
        self.tokens = tokens
        self.choices = choices

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a run writes and that outlive it."""
        written: dict[str, Tensor] = self.drafter.step_state()  # a proxy has no types
        return written | {"length": self.length}


class StaticForward:
    """A forward of up to n rows with the target's choices, for drafts of one or more sequences.

    Unused rows are the last sequence's, see no other row and are seen by none; its stretch has room
    for them.

    Args:
        shape: n, the maximum number of sequences, and the number of depths that drafts may have if
            the target's rule draws: a sequence's nodes of one depth share their noise.

    Attributes, of the last run:
        report: int64 (n, 2 + k + k), if the setup has the target's rule: tokens, choices,
            candidates and the bits of their log-probs.
        logits: (n, V), if the setup has no rule, or the drafter reads them.
        hidden: (n, w H), if the drafter reads them.
    """

    def __init__(self, setup: Setup, drafter: Drafter, shape: tuple[int, int, int]) -> None:
        self.target, cache, self.bucket, self.choice = setup
        self.rows, sequences, depths = shape
        self.sequences = min(self.rows, sequences)  # each of them has a row
        self._depths = depths
        self._cache = weakref.ref(cache)
        self._needs = drafter.needs
        # One buffer goes in, one comes out: see `run`
        self._sizes = [self.rows] * 4 + [self.rows * Sight.width(self.rows)]
        self._sizes += [self.sequences * depths] * 2
        self._input = torch.zeros(sum(self._sizes), dtype=torch.long, device=self.target.device)
        self._host = on_host_like(self._input)
        columns = 2 + self._needs.candidates * (1 + self._needs.log_probs)
        self._host_report = on_host_like(self._input.new_zeros(self.rows, columns))
        self.report: Tensor | None = None
        self.logits: Tensor | None = None
        self.hidden: Tensor | None = None

    def feed(self, drafts: Sequence[Draft], stretches: Sequence[tuple[int, int]]) -> None:
        """Write the next run's rows.

        Args:
            stretches: of each sequence, its first column and its number of committed ones.
        """
        tokens, positions, columns, noise_of, table, noise_at, noise_seeds = (
            part.numpy() for part in torch.split(self._host, self._sizes)
        )
        fill_table(
            table.reshape(self.rows, -1),
            [draft.tree.host_ancestors.numpy() for draft in drafts],
            stretches,
        )
        seeds = repeat(0) if self.choice is None else self.choice.seeds
        first = 0
        noise = 0
        for draft, (base, length), seed in zip(drafts, stretches, seeds, strict=False):
            count = len(draft.tree)
            rows = slice(first, first + count)
            depths = np.array(draft.tree.depth_of)
            positions[rows] = depths + length
            noise_of[rows] = depths + noise
            noise_rows = slice(noise, noise + self._depths)
            noise_at[noise_rows] = np.arange(self._depths) + length + 1
            noise_seeds[noise_rows] = seed
            noise = noise_rows.stop
            columns[rows] = np.arange(base + length, base + length + count)
            if draft.tokens.device.type == "cpu":
                tokens[rows] = draft.tokens.numpy()
            first += count
        positions[first:] = length
        columns[first:] = columns[first - 1] + np.arange(1, 1 + self.rows - first)
        tokens[first:] = 0
        # the last run has read its input, as its report was read
        self._input.copy_(self._host, non_blocking=True)
        drafted = [draft.tokens for draft in drafts]
        # copied without waiting; a method may draft on either
        if any(part.device.type != "cpu" for part in drafted):
            on_device = [part.to(self._input.device) for part in drafted]
            torch.cat(on_device, out=self._input[:first])

    def run(self) -> None:
        cache = self._cache()
        needs = self._needs
        assert cache is not None
        parts = torch.split(self._input, self._sizes)
        tokens, positions, columns, noise_of, table, noise_at, seeds = parts
        sight = Sight(table.view(self.rows, -1), self.sequences)
        logits, self.hidden = self.target.forward_static(
            cache, tokens, positions, columns, sight, self.bucket, hidden=needs.hidden
        )
        # a graph would keep them for good
        self.logits = logits if needs.logits or self.choice is None else None
        if self.choice is not None:
            choices = self.choice.among(logits, noise_at, noise_of, seeds)
            candidates, log_probs = candidates_of(logits, needs.candidates, needs.log_probs)
            report = [torch.stack((tokens, choices), 1)]
            if candidates is not None:
                report.append(candidates)
            if log_probs is not None:
                report.append(log_probs.double().view(torch.long))
            self.report = torch.cat(report, 1)

    def forwarded(self, drafts: Sequence[Draft], *, copied: bool) -> list[Forwarded]:
        """Return each draft's outputs: tokens and choices on the host, candidates next to the
        draft.

        The report is the only transfer for which the host waits.

        Args:
            copied: of a graph, as other graphs' replays write into its memory.
        """
        report, logits, hidden = (
            output.clone() if copied and output is not None else output
            for output in (self.report, self.logits, self.hidden)
        )
        on_host: Any = None if report is None else fetch(report, self._host_report).clone()
        k = self._needs.candidates
        outputs = []
        first = 0
        for draft in drafts:
            rows = slice(first, first + len(draft.tree))
            first = rows.stop
            output = Forwarded(
                logits=None if logits is None else logits[rows],
                hidden=None if hidden is None else hidden[rows],
            )
            if report is not None:
                output.tokens, output.choices = on_host[rows, :2].unbind(1)
                numbers = (on_host if draft.tree.device.type == "cpu" else report)[rows]
                if k:
                    output.candidates = numbers[:, 2 : 2 + k]
                if self._needs.log_probs:
                    output.log_probs = numbers[:, 2 + k :].view(torch.double).float()
            outputs.append(output)
        return outputs

    def state(self) -> dict[str, Tensor]:
        return {}
