"""A tree for the machine: the draft tree follows from measured step times and observed acceptance.

Verifying n nodes takes T(n), and a tree of n nodes is expected to have E(n) drafts accepted. Tokens a second are
(1 + E(n)) / T(n): few nodes where nodes are dear (a CPU), many where they are almost free (a large GPU), none where
drafting does not pay. T is measured once a machine; which nodes and how many is learnt while decoding.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..decoding import Drafter, Target, Tree, Verification, generate
from ..decoding.tree import RankPath
from ..errors import UserError
from ..vanilla import Vanilla
from .acceptance import MEMORY, Acceptance
from .drafter import RecyclingSession, TokenRecycling
from .templates import best_order

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80)  # nodes below the root that are considered
TILED = (7, 15, 31, 63, 79)  # on CUDA these, too: with the root they fill the tiles of its matrix units
LEAST = (12, 2)  # tokens and rounds by which step times are measured, however slow the model
RECONSIDER = 16  # steps between two choices of a size
REORDER = 32  # the nodes are put in order anew at this step, and at four times as many, and again
PROBE = 16  # every so many steps a larger tree than the one in use is tried, to see what it would give;
PROBE_IDLE = 64  # more rarely where drafting does not pay, as a probe then costs most
PROBE_UP = 3  # larger by so many sizes
LEARN, LEARN_NODES = 24, 24  # the first steps use this many nodes, whatever the power law promises
SWITCH_GAIN = 1.02  # a change of size must promise this much
# A tree of n nodes also fills the matrix n rows a step: acceptance learnt with m nodes a step is about
# ((n + 1) / (m + 1)) ** FILLING of what it is once n are used. Measured on the embedded model, n from 4 to 80.
FILLING = 0.2
# And acceptance grows as the matrix fills: by the number of steps, to the same power. The choice is made for the matrix
# as it will be after so many steps; else an empty one looks as if drafting did not pay, small trees are chosen, and the
# matrix stays empty.
HORIZON = 1024
DEEP = 12  # chains of first candidates are considered down to this depth


class AutoRecycling(TokenRecycling):
    """Token Recycling whose tree is the best n nodes, both the order of the nodes and n learnt while decoding.

    It starts from the published tree's nodes, likelier ones first. The order changes rarely, so that few topologies
    are ever compiled or captured; within an order the trees are nested, and n follows acceptance closely.

    Args:
        step_seconds: measured T(n) by nodes below the root; must hold 0.
        plain_seconds: of a step that neither drafts nor learns, for the prediction; default T(0).
        budget: at most so many nodes.
        others: as TokenRecycling.

    Raises:
        UserError: no step time for 0 nodes, or a negative budget.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        step_seconds: Mapping[int, float],
        plain_seconds: float | None = None,
        budget: int = 80,
        k: int = 8,
        recycle_prompt: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int64,
        update: str = "all",
        eos: Collection[int] = (),
    ) -> None:
        if budget < 0 or 0 not in step_seconds:
            raise UserError(f"tree=auto: needs a budget of at least 0 (is {budget}) and the step time of 0 nodes")
        self.sizes = sorted(n for n in step_seconds if n <= budget)
        self.seconds = [step_seconds[n] for n in self.sizes]
        self._first = sum(n <= LEARN_NODES for n in self.sizes) - 1  # index of the size to begin with
        self.plain_seconds = step_seconds[0] if plain_seconds is None else plain_seconds
        self.acceptance = Acceptance(considered(k))
        self._first_order = [self.acceptance.rank_paths.index(path) for path in best_order(self.sizes[-1], k)]
        self._order = list(self._first_order)
        self._trees: dict[tuple[int, ...], Tree] = {}
        device = torch.device(device)
        self.largest = self._tree_of(len(self.sizes) - 1, device)
        settings = dict(k=k, recycle_prompt=recycle_prompt, device=device, dtype=dtype, update=update, eos=eos)
        super().__init__(vocab_size, self.largest, **settings)  # type: ignore[arg-type]
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.acceptance.reset()
        self._order = list(self._first_order)
        self._steps, self._index = 0, 0  # steps seen; index of the size in use
        self._usual = math.log1p(self.sizes[self._first])  # mean of log(1 + nodes) over the steps that are remembered
        self._expected = self._expect()
        self._predicted = [0.0, 0.0]  # tokens and seconds, of all steps so far, each as foreseen before it
        self._used = [0] * len(self.sizes)  # steps by size

    @property
    def size(self) -> int:
        """Nodes below the root now."""
        return self.sizes[self._index]

    def expected(self) -> list[float]:
        """E(n) by size: expected accepted drafts a step, as known at the last choice."""
        return self._expected

    def predicted_speedup(self) -> list[float]:
        """Decoding speed by size, over plain decoding on the same engine."""
        return [self.plain_seconds * (1 + e) / t for e, t in zip(self._expected, self.seconds, strict=True)]

    def describe(self) -> dict[str, Any]:
        tokens, seconds = self._predicted
        return {
            "sizes": self.sizes,
            "step_seconds": self.seconds,
            "plain_seconds": self.plain_seconds,
            "expected_accepted": self.expected(),
            "predicted_speedup_by_size": self.predicted_speedup(),
            "chosen": self.size,
            "chosen_nodes": [list(self.acceptance.rank_paths[i]) for i in self._order[: self.size]],
            "steps_by_size": self._used,
            "predicted_speedup": self.plain_seconds * tokens / seconds if seconds else None,
        }

    def session(self) -> AutoSession:
        return AutoSession(self)

    def choose(self) -> None:
        """Before a step: the tree that is to be used."""
        index = self._index
        if self._steps < LEARN:
            index = self._first
        elif self._steps == LEARN or self._steps % RECONSIDER == 1 or is_reorder(self._steps):
            index = self._reconsider()
        elif self._steps % (PROBE if index else PROBE_IDLE) == 0:
            index = min(index + PROBE_UP, len(self.sizes) - 1)
        tree = self._tree_of(index, self.device)
        if self.tree is not tree:
            self.use_tree(tree)

    def account(self, verification: Verification) -> None:
        """After a step: what it taught."""
        tree = verification.draft.tree
        index = self.sizes.index(len(tree) - 1)
        self._predicted[0] += 1 + self._expected[index]
        self._predicted[1] += self.seconds[index]
        self._used[index] += 1
        self._steps += 1
        self._usual += (math.log1p(len(tree) - 1) - self._usual) / MEMORY
        self.acceptance.update(tree, verification.node)

    def _reconsider(self) -> int:
        p = self.acceptance.probabilities()
        if is_reorder(self._steps):
            self._order = sorted(range(len(p)), key=lambda i: (-p[i], i))[: self.sizes[-1]]  # a child is never likelier
        self._expected = self._expect()
        ripe = max(HORIZON / self._steps, 1.0) ** FILLING
        speeds = [(1 + e * ripe) / t for e, t in zip(self._expected, self.seconds, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] > SWITCH_GAIN * speeds[self._index]:
            self._index = best
        return self._index

    def _expect(self) -> list[float]:
        p = self.acceptance.probabilities()
        total = [0.0, *itertools.accumulate(p[i] for i in self._order)]
        return [total[n] * math.exp(FILLING * (math.log1p(n) - self._usual)) for n in self.sizes]

    def _tree_of(self, index: int, device: torch.device) -> Tree:
        """The tree of a size in the order now; built when first used."""
        nodes = tuple(self._order[: self.sizes[index]])
        if nodes not in self._trees:
            self._trees[nodes] = Tree.from_rank_paths(self.acceptance.rank_paths[i] for i in nodes).on(device)
        return self._trees[nodes]

    def state_dict(self) -> dict[str, torch.Tensor]:
        learnt = {
            "order": torch.tensor(self._order, dtype=torch.int64),
            "clock": torch.tensor([self._steps, self._index, *self._used]),
            "expectation": torch.tensor([*self._expected, *self._predicted, self._usual], dtype=torch.float64),
        }
        return super().state_dict() | self.acceptance.state_dict() | learnt

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes a plain matrix, too: then the choice starts from the power law."""
        super().load_state_dict({"candidates": state["candidates"]} if "candidates" in state else state)
        if "clock" not in state:
            return
        self.acceptance.load_state_dict(state)
        steps, index, *used = state["clock"].tolist()
        if len(used) != len(self.sizes) or len(state["order"]) != self.sizes[-1]:
            raise UserError("tree=auto: the saved state considered other sizes; start from another one or cold")
        self._order, self._steps, self._index, self._used = state["order"].tolist(), steps, index, used
        *self._expected, tokens, seconds, self._usual = state["expectation"].tolist()
        self._predicted = [tokens, seconds]


class AutoSession(RecyclingSession):
    """A sequence of it: what all of them teach is the method's."""

    method: AutoRecycling

    def choose(self) -> None:
        self.method.choose()

    def account(self, verification: Verification) -> None:
        self.method.account(verification)


def considered(k: int) -> tuple[RankPath, ...]:
    """The rank paths among which nodes are chosen: the likeliest by the power law, and long chains of rank 0."""
    chains = [(0,) * depth for depth in range(1, DEEP + 1)]
    ends = [(*path, rank) for path in chains for rank in range(min(2, k))]
    paths = {*best_order(2 * SIZES[-1], k), *chains, *ends}
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def sizes_on(device: torch.device) -> tuple[int, ...]:
    """Nodes below the root that are considered on a device."""
    return tuple(sorted({*SIZES, *TILED})) if device.type == "cuda" else SIZES


def is_reorder(steps: int) -> bool:
    """Is the order learnt anew at this step? At 32, 128, 512, ..."""
    while steps > REORDER and steps % 4 == 0:
        steps //= 4
    return steps == REORDER


def measure_step_seconds(
    target: Target,
    prompt: list[int],
    make: Callable[[int], Drafter],
    *,
    budget: int,
    tokens: int = 48,
    rounds: int = 5,
    allowed: float = 60.0,
) -> tuple[float, dict[int, float]]:
    """Seconds of a whole step: plain, and T(n) by nodes below the root; medians of rounds in which they take turns.

    A run's first third is left out: after steps of another size caches hold other things, and on a CPU a plain step
    takes up to 1.3 times as long for some ten steps.

    Args:
        prompt: sets the context; a few hundred tokens are typical.
        make: the method, with as many nodes a draft; 0 of them, too.
        budget: sizes above it are not measured.
        tokens: decoded a size and round.
        allowed: seconds that it may take: a slow model decodes fewer tokens, and in fewer rounds, but LEAST of both.
    """
    drafters: dict[int, Drafter] = {n: make(n) for n in sizes_on(target.device) if n <= budget}
    target.reserve(1 + max(drafters))
    drafters[-1] = Vanilla(target.device)
    seconds: dict[int, list[float]] = {n: [] for n in drafters}
    warm = [generate(target, drafter, prompt, max_new_tokens=8) for drafter in drafters.values()]
    once = sum(out.prefill_s for out in warm)  # a round costs this, and so much for each token of each run
    each = max(sum(out.decode_s / max(len(out.tokens) - out.accept_lengths[0], 1) for out in warm), 1e-9)
    tokens = min(tokens, max(LEAST[0], int((allowed / rounds - once) / each)))
    rounds = min(rounds, max(LEAST[1], int(allowed / (once + each * tokens))))
    for _ in range(rounds):
        for n, drafter in drafters.items():
            drafter.reset()
            ends: list[float] = []
            generate(target, drafter, prompt, max_new_tokens=tokens, mark=partial(_note_end, ends))
            times = [after - before for before, after in itertools.pairwise(ends)]
            seconds[n].append(statistics.median(times[len(times) // 3 :]))
    plain = seconds.pop(-1)
    # Over the plain step of the same round, so that a machine that is slower for a while shifts nothing.
    ratios = [statistics.median(t / p for t, p in zip(times, plain, strict=True)) for times in seconds.values()]
    middle = statistics.median(plain)
    return middle, {n: middle * ratio for n, ratio in zip(seconds, rising(ratios), strict=True)}


def best_of(target: Target, k: int, n: int) -> Drafter:
    """Recycling by the n best nodes, as it is timed."""
    return TokenRecycling(target.vocab_size, Tree.from_rank_paths(best_order(n, k)), k=k, device=target.device)


def rising(ratios: Sequence[float]) -> list[float]:
    """A curve from 1 up that never falls, through noisy ratios: between their running greatest and least to come.

    A step of 0 nodes is a plain one that also learns, and more nodes never take less: what says otherwise is noise.
    """
    at_least = [max(ratio, 1.0) for ratio in ratios]
    above = itertools.accumulate(at_least, max)
    below = list(itertools.accumulate(reversed(at_least), min))[::-1]
    return [(a + b) / 2 for a, b in zip(above, below, strict=True)]


def _note_end(ends: list[float], phase: str) -> None:
    """A `mark` that keeps when the prefill and each step ended; by then the step's outcome is on the host."""
    if phase in ("prefill", "loop"):
        ends.append(time.perf_counter())
