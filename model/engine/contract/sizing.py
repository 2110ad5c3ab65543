"""The size of a draft, tuned while decoding: `nodes="auto"`.

A drafter estimates each node's acceptance probability, best first, so n nodes promise 1 + (the sum
of the first n) tokens. A step takes the size with the greatest tokens - speed * T(n): speed is
recent tokens per second, T(n) the median time of the last steps of n nodes (Dinkelbach's way to the
best quotient).

Once an answer has lost more than `allowed` plain steps, drafting pauses. Where drafts are
worthless, 200 tokens lose about 3 % on a calm CPU and 4 % on an H200.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median, median_low
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import UserError
from .saved import MAX_COUNT, State, checked

LEAST_SECONDS = 1e-9  # of a saved step
MAX_AUTO = 80  # nodes of nodes=auto
# rows of the prompt's last tokens; a row of logits takes 1/100 of a step of SmolLM2 on a CPU
PROMPT_ROWS = 64
# A draft of n nodes also writes n rows, which later drafts use: acceptance is about
# ((n + 1) / (m + 1)) ** FILLING times that with m rows. Measured on the embedded model for 4 to 80.
FILLING = 0.2

Likelihoods = Sequence[float] | NDArray[np.float64]  # of the root, 1, and of the nodes, best first


@dataclass(frozen=True)
class Policy:
    """What is tried on a kind of device, and what drafting may cost. Times are in plain steps."""

    sizes: tuple[int, ...]  # nodes below the root
    # the size of the first `min_samples` drafts, whatever they promise, so that the tables fill
    start: int
    slope: float  # estimated time of a node before any sample
    overhead: float = 0.02  # estimated time of drafting
    window: int = 32  # steps in an average
    min_samples: int = 8  # newest samples that suffice to notice another machine
    # relative error of unmeasured times; they change by more on another machine
    uncertainty: float = 0.2
    probe: int = 4  # steps between two plain ones, at first
    rest: int = 16  # steps until drafting is tried again, at first
    rest_per_loss: int = 40  # least steps of a rest for each plain step lost
    backoff: int = 16  # the greatest factor by which probe and rest grow
    allowed: float = 3.0  # loss that an answer may have
    trial: float = 0.5  # loss that a trial after a rest may have
    saved: float = 16.0  # greatest gain that is counted


# On CUDA, a size and the root fill the tiles of the matrix units, and sizes are few, as each is
# captured separately.
POLICIES = {
    "cpu": Policy((0, 2, 4, 8, 12, 16, 24, 40), start=8, slope=0.03),
    "cuda": Policy((0, 3, 7, 15, 31, 63), start=31, slope=0.004),
}


class StepTimes:
    """Seconds of a plain step, index 0, then of a step by size.

    Args:
        prior: the curve before any sample, in plain steps.
        start: index of the first drafts' size.

    Attributes:
        seconds: T(n); it never falls.
        optimistic: T(n) less its standard error; infinite for sizes far beyond the measured ones.
    """

    def __init__(self, prior: Sequence[float], policy: Policy, start: int) -> None:
        self._policy = policy
        self._start = start
        self._noise = 0.0
        self._samples: list[deque[float]] = [deque(maxlen=policy.window) for _ in prior]
        self._latest: deque[tuple[int, float]] = deque(maxlen=policy.window)  # index, seconds
        self.restart(prior)

    def restart(self, prior: Sequence[float]) -> None:
        self._prior = self.seconds = self.optimistic = list(prior)
        self._medians: dict[int, float] = {}  # of the samples, by index
        self._latest.clear()
        for samples in self._samples:
            samples.clear()

    def observe(self, index: int, seconds: float) -> bool:
        """Add a step. Returns True if the newest steps show another machine."""
        newest = self._policy.min_samples
        if not self._latest:  # the prior was in plain steps, or is of another process
            self.restart([seconds / self.seconds[index] * t for t in self.seconds])
        self._add(index, seconds)
        self._fit()
        ratios = [seconds / self.seconds[index] for index, seconds in self._latest]
        self._noise = 1.5 * median_low(abs(ratio - 1.0) for ratio in ratios)  # std if it is normal
        if len(ratios) < 2 * newest:
            return False
        # if the newest steps take much more or less time, all sizes are measured anew
        change = median(ratios[-newest:]) / median(ratios[:-newest])
        limit = 1.0 + self._policy.uncertainty + 2.0 * self._noise
        if 1.0 / limit < change < limit:
            return False
        steps = list(self._latest)[-newest:]
        self.restart([change * t for t in self.seconds])
        for step in steps:
            self._add(*step)
        self._fit()
        return True

    def _add(self, index: int, seconds: float) -> None:
        self._latest.append((index, seconds))
        self._samples[index].append(seconds)
        # of two samples the lower one: a size's first step also sets up what later ones use
        self._medians[index] = median_low(self._samples[index])

    def _fit(self) -> None:
        measured = sorted(self._medians)
        times = []
        for index, prior in enumerate(self._prior):
            nearest = min(measured, key=lambda other: abs(other - index))
            times.append(self._medians[nearest] * prior / self._prior[nearest])
        above = accumulate(times, max)
        below = [*accumulate(reversed(times), min)][::-1]
        self.seconds = [(a + b) / 2 for a, b in zip(above, below, strict=True)]
        errors = [
            self._noise / math.sqrt(len(s)) if s else self._policy.uncertainty
            for s in self._samples
        ]
        self.optimistic = [
            t * (1.0 - min(error, 0.5)) for t, error in zip(self.seconds, errors, strict=True)
        ]
        end = max(measured[-1], self._start) + 2
        self.optimistic[end:] = [math.inf] * len(self.optimistic[end:])


class Sizing:
    """Chooses sizes and learns T(n) for each number of sequences in a step.

    A step is `begin_step`, `choose` by each of its sequences unless it is plain, and `observe`.

    Args:
        nodes: auto, or auto:N for at most N.
        device: of the target.
        filling: see FILLING; 0 where a draft's nodes teach nothing.

    Attributes:
        sizes: nodes below the root, ascending from 0.
        resting: drafting pauses for now.
    """

    def __init__(self, nodes: str, device: torch.device, *, filling: float = FILLING) -> None:
        limit = budget_of(nodes)
        self._policy = POLICIES["cuda" if device.type == "cuda" else "cpu"]
        policy = self._policy
        self.sizes = [n for n in policy.sizes if n < limit] + [limit]
        self._start = min(bisect_left(self.sizes, policy.start), len(self.sizes) - 1)
        self._filling = [filling * math.log1p(n) for n in self.sizes]
        self._times_of: dict[int, StepTimes] = {}  # by width
        self._times = self._of_width(1)
        self._since_plain = policy.probe
        self._probe = policy.probe
        self._drafts = 0
        self.reset()

    def reset(self) -> None:
        """Forget expected tokens, chosen sizes, gains and losses; step times are the machine's."""
        self.resting = False
        self.balance = self._policy.allowed
        # steps until the next trial, and in the next rest
        self._left = 0
        self._rest = self._policy.rest
        # a step's recent average of tokens, and of its time in plain steps
        self._recent = [1.0, 1.0]
        self._promised = [1.0] * len(self.sizes)
        self._used = [0] * (1 + len(self.sizes))
        self._tokens = 0.0

    def _of_width(self, width: int) -> StepTimes:
        if width not in self._times_of:
            policy = self._policy
            # a plain step has `width` rows
            slope = policy.slope * width / (1.0 + policy.slope * (width - 1))
            prior = [1.0, *(1.0 + policy.overhead + slope * n for n in self.sizes)]
            self._times_of[width] = StepTimes(prior, policy, 1 + self._start)
            # so the first step of this width is plain
            self._since_plain = policy.backoff * policy.probe
        return self._times_of[width]

    def expect(self, rows: Sequence[int], times: Sequence[float]) -> None:
        """Begin from measured times of forwards by rows, in any unit, until steps are timed."""
        beyond = times[-1] + (times[-1] - times[-2]) * rows[-1] / (rows[-1] - rows[-2])
        nodes = np.array([0, *self.sizes])
        beyond = max(beyond, times[-1])
        curve = np.interp(1 + nodes, [*rows, 2 * rows[-1]], [*times, beyond]) / times[0]
        curve[1:] += self._policy.overhead
        self._times_of[1].restart(curve.tolist())

    @property
    def times(self) -> list[float]:
        return self._times.seconds

    def begin(self) -> int:
        """Begin a sequence, which may lose no more than `allowed`.

        Returns:
            How many of the prompt's last tokens need logits, if the drafter learns from them.
        """
        self.balance = min(self.balance, self._policy.allowed)
        return 0 if self.resting else PROMPT_ROWS

    def begin_step(self, width: int = 1) -> bool:
        """Begin a step of so many sequences.

        Returns:
            True if it must be plain: to measure plain steps, or because drafting does not pay.
        """
        self._times = self._of_width(width)
        self._promised = [1.0] * len(self.sizes)
        self._since_plain = self._since_plain + 1
        self._plain = self.resting or self._since_plain > self._probe
        if self.resting:
            self._left -= 1
            if self._left <= 0:
                self.resting = False
                self.balance = max(self.balance, self._policy.trial)
        elif self._plain:
            self._probe = min(2 * self._probe, self._policy.backoff * self._policy.probe)
        return self._plain

    def choose(self, likelihoods: Likelihoods, following: float = -1.0) -> int:
        """Return the number of nodes to draft. If fewer are listed, grow the draft and call again.

        Args:
            likelihoods: of all nodes, or of a draft grown to one of `sizes`.
            following: upper bound for further nodes' likelihood; negative: there are none.
        """
        sums: list[float] = np.cumsum(likelihoods)[
            np.minimum(self.sizes, len(likelihoods) - 1)
        ].tolist()
        starting = self._drafts < self._policy.min_samples
        end = bisect_left(self.sizes, len(likelihoods) - 1) + 1
        if following >= 0 and end < len(self.sizes):
            bounds = [
                sums[end - 1] + following * (n - self.sizes[end - 1]) for n in self.sizes[end:]
            ]
            worth = self._worth([*sums[:end], *bounds])
            grows = end <= self._start if starting else max(worth[end:]) > max(worth[:end])
            if grows:
                return self.sizes[end]
        self._promised, worth = sums, self._worth(sums)
        chosen = self._start if starting else max(range(len(worth)), key=worth.__getitem__)
        new = sums[chosen], self.times[1 + chosen] / self.times[0]
        self._recent = [
            mean + (value - mean) / self._policy.window
            for mean, value in zip(self._recent, new, strict=True)
        ]
        self._drafts += 1
        return min(self.sizes[chosen], len(likelihoods) - 1)

    def observe(self, nodes: int, tokens: float, seconds: float) -> None:
        # a draft may be shorter than its size
        size = min(bisect_left(self.sizes, nodes), len(self.sizes) - 1)
        index = 0 if self._plain else 1 + size
        if self._times.observe(index, seconds):
            self._probe = self._policy.probe
            self._left = 0
            self._rest = self._policy.rest
        self._used[index] += 1
        self._tokens += 1.0 if self._plain else self._promised[size]
        if self._plain:
            self._since_plain = 0
        else:
            self._count(tokens - self.times[index] / self.times[0])

    def _worth(self, tokens: Sequence[float]) -> list[float]:
        """Return tokens by size, plus those its rows add later, minus those decoded otherwise."""
        mean, seconds = self._recent
        speed = mean / seconds / self.times[0]
        later = max(mean - 1.0, 0.0)
        times = self._times.optimistic[1:]
        return [
            n + later * f - speed * t for n, f, t in zip(tokens, self._filling, times, strict=True)
        ]

    def _count(self, gain: float) -> None:
        policy = self._policy
        self.balance = min(self.balance + gain, policy.saved)
        if self.balance > policy.allowed:
            self._rest = policy.rest
        elif self.balance < 0 and not self.resting:
            self.resting = True
            self._left = max(self._rest, int(-policy.rest_per_loss * self.balance))
            self._rest = min(2 * self._rest, policy.backoff * policy.rest)

    def describe(self) -> dict[str, Any]:
        plain = self.times[0]
        spent = sum(n * t for n, t in zip(self._used, self.times, strict=True))
        return {
            "sizes": self.sizes,
            "step_seconds": self.times[1:],
            "plain_seconds": plain,
            "plain_steps": self._used[0],
            "steps_by_size": self._used[1:],
            "predicted_speedup": plain * self._tokens / spent if spent else None,
        }

    def state_dict(self) -> State:
        """Return float64 (3, 1 + sizes): seconds, steps, then all expected tokens and zeros."""
        tokens = [self._tokens, *(0.0 for _ in self.sizes)]
        rows = [self._times_of[1].seconds, self._used, tokens]
        return {"sizing": torch.tensor(rows, dtype=torch.float64)}

    def read(self, state: State) -> list[list[float]] | None:
        if "sizing" not in state:
            return None
        saved = checked(state, "sizing", (3, -1), 0, MAX_COUNT, real=True)
        if saved.shape[1] != len(self.times):
            return None
        if bool((saved[0] < LEAST_SECONDS).any()):
            raise UserError("start: the saved step times are no positive numbers")
        rows: list[list[float]] = saved.tolist()
        return rows

    def load(self, saved: list[list[float]]) -> None:
        times, used, (self._tokens, *_) = saved
        self._used = [int(n) for n in used]
        self._times_of[1].restart(times)


def steps_in_words(described: dict[str, Any]) -> str:
    """Say the shares of steps by size, largest first, down to a tenth, from `Sizing.describe`."""
    counts = dict(zip(described["sizes"], described["steps_by_size"], strict=True))
    counts[0] += described["plain_steps"]
    total = sum(counts.values())
    by_count = sorted(counts, key=lambda n: -counts[n])
    shares = [f"{counts[n] / total:.0%} of {n}" for n in by_count if counts[n] >= total / 10]
    return f"steps: {', '.join(shares)} nodes".replace("%", " %")


def finds_size(drafter: Any) -> bool:
    """True for a drafter class that takes `nodes="auto"`; such a class defines `sizing` itself."""
    return "sizing" in vars(drafter)


def budget_of(nodes: int | str) -> int:
    """Return N of a number, auto:N, or auto (MAX_AUTO). Raises UserError for another word."""
    if not isinstance(nodes, str):
        return nodes
    word, _, limit = nodes.partition(":")
    if word != "auto" or (limit and not limit.isdecimal()) or nodes.endswith(":"):
        raise UserError(f"nodes={nodes}: must be a number, auto, or auto:N for at most N")
    return int(limit) if limit else MAX_AUTO
