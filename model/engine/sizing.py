"""The size of a draft, found while decoding: `nodes="auto"`.

A method says how likely each node of its draft is accepted, best first, so n nodes promise 1 + (the sum of the first n)
tokens. What a step of n nodes takes, T(n), is the median of its last steps, for a few sizes. A step takes the size with
the greatest tokens - speed * T(n), where speed is tokens a second of late (Dinkelbach's way to the best quotient).

- An unmeasured size is believed to take what the curve known before says, in proportion to the nearest measured size.
  T(n) is taken as optimistically as its samples allow, so sizes that may be better are tried, and others are not.
- Where the newest steps all take longer than foreseen, or less, the machine is another one: sizes are measured anew.
- What drafting wins and loses is booked in plain steps. An answer may lose ALLOWED more than it won. Then steps are
  plain, and drafting is tried again from time to time: where drafts are worthless, 200 tokens lose about 3 % on a calm
  machine and 4 % at worst. With 30 % noise it is 3 %, too, but no bound holds: one answer of 1,600 lost 10 %, as step
  times that scatter so much cannot be distinguished in 200 steps (see the simulation in the tests).
- Where drafts pay only once tables are full it does not find out: that takes more than ALLOWED.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median, median_low
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import UserError

MOST = 80  # nodes of nodes=auto
# Nodes below the root, by kind of device; the first steps have START. On CUDA they fill the tiles of its matrix units
# with the root, and are few, as steps of each size are captured by themselves.
SIZES = {"cpu": (0, 2, 4, 8, 12, 16, 24, 40), "cuda": (0, 3, 7, 15, 31, 63)}
START, LEARN = {"cpu": 8, "cuda": 31}, 8  # the first LEARN drafts fill the tables, whatever they promise
SLOPE, OVERHEAD = {"cpu": 0.03, "cuda": 0.004}, 0.02  # of a node, and of drafting, over a plain step, before any sample
KEPT, NEWEST = 32, 8  # steps of a size whose median counts; steps that tell that the machine is another one
PROBE = (4, 64)  # steps between two plain ones, at first; then twice as many, up to the second
UNKNOWN = 0.2  # share of its time that a size may take less, if only its neighbour was measured
MOVED = 0.2  # relative change of step times, plus twice their noise, from which the machine is another one
ALLOWED, TRIAL, SAVED = 3.0, 0.5, 16.0  # plain steps that an answer may lose; that a trial may; that count as won
REST = (16, 256)  # plain steps until the next trial, at first; then twice as many, up to the second
REST_PER_LOSS = 40  # and at least so many for each plain step lost
MEMORY = 32.0  # steps over which the speed is averaged
# A draft of n nodes also writes n rows, which later drafts live on: what is accepted with m rows a step is about
# ((n + 1) / (m + 1)) ** FILLING of that once there are n. Measured on the embedded model, n from 4 to 80.
FILLING = 0.2
PROMPT_ROWS = 64  # of the prompt's last tokens; a row of logits takes a hundredth of a step of SmolLM2 on a CPU

Likelihoods = Sequence[float] | NDArray[np.float64]  # of the root, 1, and of the nodes, best first


class Sizing:
    """Chooses sizes and learns T(n). Sequences may take turns: a step is `rests`, `choose` unless it rests, `took`.

    Args:
        nodes: auto, or auto:N for at most N.
        device: of the target; its kind says which sizes are tried.
        filling: see FILLING; 0 where a draft's nodes teach nothing.

    Attributes:
        sizes: nodes below the root, ascending from 0.
        times: seconds of a plain step, then T(n) by size.
        resting: steps are plain for now.

    Raises:
        UserError: another word.
    """

    def __init__(self, nodes: str, device: torch.device, *, filling: float = FILLING) -> None:
        most, kind = budget_of(nodes), "cpu" if device.type != "cuda" else "cuda"
        self.sizes = [n for n in SIZES[kind] if n < most] + [most]
        self.times = [1.0, *(1.0 + OVERHEAD + SLOPE[kind] * n for n in self.sizes)]
        self._start = min(bisect_left(self.sizes, START[kind]), len(self.sizes) - 1)
        self._filling = [filling * math.log1p(n) for n in self.sizes]
        self._samples: list[deque[float]] = [deque(maxlen=KEPT) for _ in self.times]
        self._latest: deque[tuple[int, float]] = deque(maxlen=KEPT)  # place among `times`, seconds
        self._noise = 0.0
        self._since_plain, self._probe, self._drafts = PROBE[0], PROBE[0], 0
        self._remember(self.times)
        self.reset()

    def reset(self) -> None:
        """Forget what was promised, chosen, won and lost; step times are the machine's and stay."""
        self.resting, self.balance = False, ALLOWED
        self._left, self._rest = 0, REST[0]  # plain steps until the next trial; of the next rest
        self._recent = [1.0, 1.0]  # tokens and plain steps of a step, lately
        self._promised: list[float] = [1.0] * len(self.sizes)
        self._used, self._expected, self._tokens = [0] * len(self.times), [0.0] * len(self.sizes), 0.0

    @property
    def prompt_rows(self) -> int:
        """Of how many of a prompt's last tokens the logits are worth computing, for a method that learns from them."""
        return 0 if self.resting else PROMPT_ROWS

    def opened(self) -> None:
        """A sequence begins: whatever others won, it may lose no more than ALLOWED."""
        self.balance = min(self.balance, ALLOWED)

    def rests(self) -> bool:
        """Before a step: is it to be plain, to measure that or because drafting does not pay?"""
        self._promised, self._since_plain = [1.0] * len(self.sizes), self._since_plain + 1
        if self.resting:
            self._left -= 1
            if self._left <= 0:
                self.resting, self.balance = False, max(self.balance, TRIAL)
        elif self._since_plain > self._probe:
            self._probe = min(2 * self._probe, PROBE[1])
        else:
            self._plain = False
            return False
        self._plain = True
        return True

    def enough(self, likelihoods: Likelihoods, following: float) -> bool:
        """True if no larger size can be better than those reached, even if all its nodes are as likely as the next."""
        at = bisect_left(self.sizes, len(likelihoods) - 1)
        if self._drafts < LEARN:
            return at >= self._start
        tokens = self._sums(likelihoods)
        most = [tokens[at] + following * (n - self.sizes[at]) for n in self.sizes]
        worth = self._worth([*tokens[: at + 1], *most[at + 1 :]])
        return max(worth[at + 1 :], default=-math.inf) <= max(worth[: at + 1])

    def choose(self, likelihoods: Likelihoods) -> int:
        """Return the nodes of a draft."""
        tokens = self._promised = self._sums(likelihoods)
        worth = self._worth(tokens)
        at = self._start if self._drafts < LEARN else max(range(len(worth)), key=worth.__getitem__)
        new = tokens[at], self.times[1 + at] / self.times[0]
        self._recent = [mean + (value - mean) / MEMORY for mean, value in zip(self._recent, new, strict=True)]
        self._drafts += 1
        return min(self.sizes[at], len(likelihoods) - 1)

    def took(self, nodes: int, tokens: int, seconds: float) -> None:
        """After a step: learn what its size takes, and book what it added."""
        size = min(bisect_left(self.sizes, nodes), len(self.sizes) - 1)
        place = 0 if self._plain else 1 + size
        if not self._latest:  # until then times were in plain steps
            scale = seconds / self.times[place]
            self._remember([scale * t for t in self.times])
        self._latest.append((place, seconds))
        self._sample(place, seconds)
        self._learn()
        self._used[place] += 1
        self._tokens += 1.0 if self._plain else self._promised[size]
        self._expected = [a + b for a, b in zip(self._expected, self._promised, strict=True)]
        if self._plain:
            self._since_plain = 0
        else:
            self._book(tokens - self.times[place] / self.times[0])

    def _sums(self, likelihoods: Likelihoods) -> list[float]:
        """Return the tokens that are expected by size."""
        sums: list[float] = np.cumsum(likelihoods)[np.minimum(self.sizes, len(likelihoods) - 1)].tolist()
        return sums

    def _worth(self, tokens: Sequence[float]) -> list[float]:
        """Return tokens by size, with those that its rows add later, less those decoded in its time otherwise."""
        mean, seconds = self._recent
        speed, later = mean / seconds / self.times[0], max(mean - 1.0, 0.0)
        return [n + later * f - speed * t for n, f, t in zip(tokens, self._filling, self._hoped[1:], strict=True)]

    def _book(self, won: float) -> None:
        """Count what a draft won, in plain steps; rest if too much was lost."""
        self.balance = min(self.balance + won, SAVED)
        if self.balance > ALLOWED:
            self._rest = REST[0]
        elif self.balance < 0 and not self.resting:
            self.resting, self._left = True, max(self._rest, int(-REST_PER_LOSS * self.balance))
            self._rest = min(2 * self._rest, REST[1])

    def _remember(self, times: Sequence[float]) -> None:
        """Take a curve for what is believed of sizes until they are measured again."""
        self._believed = list(times)
        for samples in self._samples:
            samples.clear()
        self._medians: dict[int, float] = {}  # of the samples, by place
        self.times = self._hoped = self._believed

    def _sample(self, place: int, seconds: float) -> None:
        self._samples[place].append(seconds)
        # the lower one of two: a size's first step also makes what all of them use
        self._medians[place] = median_low(self._samples[place])

    def _learn(self) -> None:
        """Update T(n), its noise and its optimistic values; begin anew on another machine."""
        self._fit()
        ratios = [seconds / self.times[place] for place, seconds in self._latest]
        self._noise = 1.5 * median_low(abs(ratio - 1.0) for ratio in ratios)  # of a normal one the deviation
        if len(ratios) < 2 * NEWEST:
            return
        moved, most = median(ratios[-NEWEST:]) / median(ratios[:-NEWEST]), 1.0 + MOVED + 2.0 * self._noise
        if not 1.0 / most < moved < most:
            newest = list(self._latest)[-NEWEST:]
            self._remember([moved * t for t in self.times])
            self._latest.clear()
            self._latest.extend(newest)
            for place, seconds in newest:
                self._sample(place, seconds)
            self._fit()
            self._probe, self._left, self._rest = PROBE[0], 0, REST[0]

    def _fit(self) -> None:
        """Compute T(n) from the samples; it never falls. Larger sizes than one more than measured are out of reach."""
        measured = sorted(self._medians)
        times = []
        for place, believed in enumerate(self._believed):
            near = min(measured, key=lambda other: abs(other - place))
            times.append(self._medians[near] * believed / self._believed[near])
        above, below = accumulate(times, max), [*accumulate(reversed(times), min)][::-1]
        self.times = [(a + b) / 2 for a, b in zip(above, below, strict=True)]
        unsure = [self._noise / math.sqrt(len(samples)) if samples else UNKNOWN for samples in self._samples]
        self._hoped = [t * (1.0 - min(u, 0.5)) for t, u in zip(self.times, unsure, strict=True)]
        reach = max(measured[-1], 1 + self._start) + 1
        self._hoped[1 + reach :] = [math.inf] * len(self._hoped[1 + reach :])

    def describe(self) -> dict[str, Any]:
        """Return what was learnt, chosen and promised."""
        steps, plain = sum(self._used), self.times[0]
        expected = [tokens / max(steps, 1) for tokens in self._expected]
        spent = sum(n * t for n, t in zip(self._used, self.times, strict=True))
        return {
            "sizes": self.sizes,
            "step_seconds": self.times[1:],
            "plain_seconds": plain,
            "expected_accepted": [tokens - 1.0 for tokens in expected],
            "predicted_speedup_by_size": [plain * n / t for n, t in zip(expected, self.times[1:], strict=True)],
            "plain_steps": self._used[0],
            "steps_by_size": self._used[1:],
            "predicted_speedup": plain * self._tokens / spent if spent else None,
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`sizing`, float64 (3, 1 + sizes): seconds, steps and expected tokens of a plain step and by size."""
        rows = [self.times, self._used, [self._tokens, *self._expected]]
        return {"sizing": torch.tensor(rows, dtype=torch.float64)}

    def check_state(self, state: dict[str, torch.Tensor]) -> None:
        """Raise UserError if the saved times and counts are no such numbers."""
        saved = state.get("sizing", torch.zeros(0))
        if not bool((saved.isfinite() & (saved >= 0)).all()) or (saved.dim() == 2 and not bool((saved[0] > 0).all())):
            raise UserError("start: the saved step times are no positive numbers")

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load saved times and counts, unless they are of other sizes, as another kind of device or budget has."""
        self.reset()
        saved = state.get("sizing")
        if saved is None or saved.shape != (3, len(self.times)):
            return
        times, used, (self._tokens, *self._expected) = saved.tolist()
        self._used = [int(n) for n in used]
        self._latest.clear()
        self._remember(times)


def steps_in_words(described: dict[str, Any]) -> str:
    """Word the shares of steps by size, largest first, down to a tenth of them, from what a sizing describes."""
    counts = dict(zip(described["sizes"], described["steps_by_size"], strict=True))
    counts[0] += described["plain_steps"]
    total, most = sum(counts.values()), sorted(counts, key=lambda n: -counts[n])
    shares = [f"{counts[n] / total:.0%} of {n}" for n in most if counts[n] >= total / 10]
    return f"steps: {', '.join(shares)} nodes".replace("%", " %")


def finds_size(method: Any) -> bool:
    """True of the class of a method that takes `nodes="auto"`: these say so by a `sizing` of their own."""
    return "sizing" in vars(method)


def budget_of(nodes: int | str) -> int:
    """Return N of a number, auto:N, or auto (MOST). Raises UserError for another word."""
    if not isinstance(nodes, str):
        return nodes
    word, _, most = nodes.partition(":")
    if word != "auto" or (most and not most.isdigit()) or nodes.endswith(":"):
        raise UserError(f"nodes={nodes}: must be a number, auto, or auto:N for at most N")
    return int(most) if most else MOST
