"""What a step of n nodes takes on this machine, learnt from the steps themselves.

A step's seconds are a scale, the seconds of a plain step now, times a curve T(n), the same over a plain step. The scale
follows a machine that is slower for a while within a few steps. The curve is learnt from how steps of different sizes
compare that were taken next to each other, each size as fast as the noise allows (a Kalman filter by size).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch

from .draft_size import rising

PLAIN = -1  # stands for the nodes of a plain step, which neither drafts nor learns
WINDOW = 8  # steps that a step is compared with; the scale is their median
OVERHEAD = 0.02  # of a step without nodes over a plain one, before anything is measured: drafting and learning
DRIFT = 0.015**2  # variance that a curve's value gains a step, while it is not measured
NOISE = 0.05  # relative deviation of a step, at first
FORGOTTEN = 400  # steps after which a value becomes no less sure
LEAST = 0.02  # of a step over a plain one, below which nothing is in proportion
SURPRISE = 3.0  # standard deviations: whether the size or the machine is to blame, the step behind it tells
SHIFTED = 0.25**2  # variance that all sizes gain where the machine becomes another one
LEVEL, MOVED = 3, 0.2  # steps, and their relative change, that tell that the machine is slower or faster
SETTLED = 2.0  # steps of about a size after which it counts as measured


class StepTimes:
    """The curve at a few sizes, on straight lines between them, and the scale.

    Args:
        knots: these sizes, ascending from 0; each is about twice the one before.
        slope: of a node over a plain step, before anything is measured.

    Attributes:
        plain_seconds: of a plain step now; None before a step was timed.
        steps: that were timed.
        plain_at: the step at which the last plain one was timed.
        noise: relative deviation of a step.
        shifts, shift_at: how often the machine became slower or faster from one step to the next, and when it last did.
    """

    def __init__(self, knots: Sequence[int], slope: float) -> None:
        self.knots, self._slope = list(knots), slope
        self._values = [1.0 + OVERHEAD + slope * n for n in self.knots]
        self._variance = [(0.5 * (value - 1.0)) ** 2 for value in self._values]
        self._count = [0.0] * len(self.knots)
        self._seen_at = [-FORGOTTEN - 1] * len(self.knots)
        self._plain_variance = 0.0
        self.noise = NOISE
        self._window: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # nodes and seconds
        self._surprise: tuple[int, float, float] | None = None  # of the last step: nodes, deviation, spread
        self.steps, self.plain_at, self.shifts, self.shift_at = 0, -FORGOTTEN, 0, -FORGOTTEN
        self.plain_seconds: float | None = None
        self._settle()

    def at(self, nodes: int) -> float:
        """T(n): a step of so many nodes over a plain one."""
        known = self._known.get(nodes)
        if known is None:
            known = self._known[nodes] = sum(part * self._rising[knot] for knot, part in self._about(nodes))
        return known

    def curve(self, sizes: Sequence[int]) -> list[float]:
        """T(n) by size; it never falls."""
        return [self.at(n) for n in sizes]

    @property
    def reach(self) -> int:
        """Nodes that a step may try: twice as many as were measured."""
        top = max((knot for knot, count in enumerate(self._count) if count >= SETTLED), default=0)
        return self.knots[min(max(top, 1) + 1, len(self.knots) - 1)]

    def unseen(self, nodes: int) -> int:
        """Steps since one of about so many nodes; FORGOTTEN where the machine is another one since."""
        seen = self._seen_at[max(self._about(nodes), key=lambda place: place[1])[0]]
        return self.steps - seen if seen > self.shift_at else FORGOTTEN

    def settled(self, nodes: int) -> bool:
        """Whether steps of about so many nodes were measured often enough."""
        return nodes == PLAIN or all(self._count[knot] >= SETTLED * part for knot, part in self._about(nodes))

    def unsure(self, nodes: int) -> float:
        """The relative standard deviation of T(n)."""
        return math.sqrt(min(self._variance_of(nodes), 0.25))

    def note(self, nodes: int, seconds: float) -> None:
        """A step of so many nodes took so long."""
        self.steps += 1
        if self.plain_seconds is not None:
            self._compare(nodes, seconds)
        if nodes == PLAIN:
            self.plain_at = self.steps
        self._window.append((nodes, seconds))
        scales = self._forget_another_level([s / self.at(n) for n, s in self._window])
        self.plain_seconds = _median(scales)
        off = abs(scales[-1] / self.plain_seconds - 1.0)
        self.noise += (min(off, 1.0) - self.noise) / 32

    def _compare(self, nodes: int, seconds: float) -> None:
        """With the steps of other sizes before it: what they do not explain is the size's, or the machine's."""
        others = [s / self.at(n) for n, s in self._window if n != nodes]
        if not others:
            return
        off, spread = seconds / self.at(nodes) / _median(others) - 1.0, 1.0 + 1.6 / len(others)
        before, self._surprise = self._surprise, None
        if abs(off) > SURPRISE * (self._variance_of(nodes) + self._variation * spread) ** 0.5:
            if before is not None and before[0] != nodes and (before[1] > 0) == (off > 0):
                self._shifted(1)  # two sizes, one after the other: it is the machine
                return
            if before is None:
                self._surprise = nodes, off, spread
                return
        if before is not None:
            self._learn(*before)
        self._learn(nodes, off, spread)

    def _forget_another_level(self, scales: list[float]) -> list[float]:
        """Where the newest steps all took longer than those before them, or all less, the machine is another one.

        Args:
            scales: what each step of the window says that a plain one takes.

        Returns:
            Those that still say so.
        """
        if len(scales) < 2 * LEVEL:
            return scales
        before, least = _median(scales[:-LEVEL]), 1.0 + max(MOVED, SURPRISE * self.noise)
        newest = scales[-LEVEL:]
        if min(newest) > before * least or max(newest) < before / least:
            self._shifted(LEVEL)
            return newest
        return scales

    def _shifted(self, kept: int) -> None:
        """The machine became slower or faster: only so many steps are like those that come."""
        self.shifts, self.shift_at = self.shifts + 1, self.steps
        last = list(self._window)[-kept:]
        self._window.clear()
        self._window.extend(last)
        self._surprise = None
        self._variance = [variance + SHIFTED for variance in self._variance]

    @property
    def _variation(self) -> float:
        """The variance of a step's relative deviation."""
        return (1.5 * self.noise) ** 2

    def _variance_of(self, nodes: int) -> float:
        """How unsure T(n) is, relatively."""
        if nodes == PLAIN:
            return self._plain_variance + DRIFT * min(self.steps - self.plain_at, FORGOTTEN)
        return sum(part**2 * self._variance_at(knot) for knot, part in self._about(nodes))

    def _variance_at(self, knot: int) -> float:
        return self._variance[knot] + DRIFT * min(self.steps - self._seen_at[knot], FORGOTTEN)

    def _learn(self, nodes: int, off: float, spread: float) -> None:
        """A step took (1 + off) times what its size should, next to steps of other sizes."""
        noise = self._variation * spread
        if nodes == PLAIN:  # whose value is 1: it is the others that move, smaller ones less
            change, self._plain_variance = _believed(self._variance_of(PLAIN), noise, off)
            others = [self.at(n) for n, _ in self._window if n != PLAIN]
            if not others:  # they left the window meanwhile
                return
            was = _median(others)
            more, above = was / (1.0 + change) - was, max(was - 1.0, LEAST)
            self._values = [max(value + more * min((value - 1.0) / above, 1.0), 1.0) for value in self._values]
        else:
            about = self._about(nodes)
            variances = [self._variance_at(knot) for knot, _ in about]
            whole = sum(part**2 * variance for (_, part), variance in zip(about, variances, strict=True))
            change, left = _believed(whole, noise, off)  # of T(n): each of its knots has the part that it is unsure of
            for (knot, part), variance in zip(about, variances, strict=True):
                share = part * variance / max(whole, 1e-12)
                moved = min(max(share * change, -0.6), 1.5)
                self._values[knot] = max(self._values[knot] * (1.0 + moved), 1.0)
                self._variance[knot] = max(variance - share * part * (whole - left), 0.0)
                self._count[knot] += part
                self._seen_at[knot] = self.steps
        self._settle()

    def _about(self, nodes: int) -> list[tuple[int, float]]:
        """The knots that a size stands between, and how near it is to each, in parts of 1."""
        for above, knot in enumerate(self.knots):
            if knot == nodes:
                return [(above, 1.0)]
            if knot > nodes:
                part = (nodes - self.knots[above - 1]) / (knot - self.knots[above - 1])
                return [(above - 1, 1.0 - part), (above, part)]
        return [(len(self.knots) - 1, 1.0)]

    def _settle(self) -> None:
        """The curve as it is read. What was not measured lies on the line through what was, and nothing falls."""
        known = [knot for knot, count in enumerate(self._count) if count > 0]
        for knot, nodes in enumerate(self.knots):
            if knot not in known:
                self._values[knot] = self._on_line(nodes, known)
        self._rising = rising(self._values)
        self._known = {PLAIN: 1.0}

    def _on_line(self, nodes: int, known: list[int]) -> float:
        """T(n) of a size between or above the measured knots."""
        below = [knot for knot in known if self.knots[knot] <= nodes]
        above = [knot for knot in known if self.knots[knot] > nodes]
        start, value = (self.knots[below[-1]], self._values[below[-1]]) if below else (0, 1.0 + OVERHEAD)
        if above:
            end = above[0]
            slope = (self._values[end] - value) / (self.knots[end] - start)
        else:  # as between the last two sizes with nodes, if they tell: a second row may take more than all others
            slope = self._slope
            if len(below) > 1 and self.knots[below[-2]] > 0:
                slope = (value - self._values[below[-2]]) / (start - self.knots[below[-2]])
            most = max((value - 1.0) / start, self._slope) if start else self._slope
            slope = min(max(slope, self._slope / 4), most)
        return max(value + slope * (nodes - start), 1.0)

    def state(self) -> torch.Tensor:
        """float64 (4, knots + 1): sizes, values, variances, counts; of a plain step -1, its seconds or 0, and so on."""
        plain = [PLAIN, self.plain_seconds or 0.0, self._plain_variance, self.noise]
        learnt: tuple[Sequence[float], ...] = (self.knots, self._values, self._variance, self._count)
        return torch.tensor([[*own, last] for own, last in zip(learnt, plain, strict=True)], dtype=torch.float64)

    def load(self, state: torch.Tensor) -> bool:
        """Go on from a saved state, unless it is of other sizes, as another kind of device or budget has."""
        if state.dim() != 2 or len(state) != 4 or state[0].tolist() != [*self.knots, PLAIN]:
            return False
        (*values, seconds), (*variance, plain), (*count, noise) = state[1:].tolist()
        self._values, self._variance, self._count = values, variance, count
        self._plain_variance, self.noise, self.plain_seconds = plain, noise, seconds or None
        self._settle()
        return True


def doubling(sizes: Sequence[int]) -> list[int]:
    """Of ascending sizes the first, each that is twice the one taken before it or more, and the last."""
    knots = [sizes[0]]
    for size in sizes[1:]:
        if size >= 2 * knots[-1] or size == sizes[-1]:
            knots.append(size)
    return knots


def _median(values: list[float]) -> float:
    """The standard library's takes three times as long, and this is asked at every step."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _believed(variance: float, noise: float, off: float) -> tuple[float, float]:
    """How far a deviation moves a value, and how unsure that is then. Of a surprise no more than its limit counts."""
    most = SURPRISE * (variance + noise) ** 0.5
    if abs(off) > most:
        variance += most**2 / 4
        gain = variance / (variance + noise)
        return gain * (most if off > 0 else -most), variance
    gain = variance / (variance + noise)
    return gain * off, (1.0 - gain) * variance
