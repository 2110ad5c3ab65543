"""How many nodes a draft should have on this machine: what a step of n nodes takes, and the tokens that it promises.

Verifying n nodes takes T(n), and a draft of n nodes is expected to have E(n) drafts accepted. Tokens a second are
(1 + E(n)) / T(n): few nodes where nodes are expensive (a CPU), many where they are almost free (a large GPU), none
where drafting does not pay. T is measured once a machine; what is accepted is a method's to know.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..decoding import Drafter, Target, generate
from ..errors import UserError
from ..vanilla import Vanilla

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80)  # nodes below the root that are considered
TILED = (7, 15, 31, 63, 79)  # on CUDA these, too: with the root they fill the tiles of its matrix units
LEAST = (12, 2)  # tokens and rounds by which step times are measured, however slow the model
# A draft of n nodes also writes n rows, which later drafts live on: what is accepted with m rows a step is about
# ((n + 1) / (m + 1)) ** FILLING of that once there are n. Measured on the embedded model, recycling, n from 4 to 80.
FILLING = 0.2


class StepCosts:
    """The sizes that a draft may have, what a step of each takes, and what was foreseen of the steps so far.

    Args:
        seconds: T(n) of a whole step by nodes below the root; must hold 0.
        plain_seconds: of a step that neither drafts nor learns, for the prediction; None: T(0).
        budget: at most so many nodes.

    Attributes:
        sizes, seconds: n and T(n), ascending.
        used: steps by size.
        predicted: tokens and seconds of all steps, each as foreseen before it.

    Raises:
        UserError: no step time for 0 nodes, or a negative budget.
    """

    def __init__(self, seconds: Mapping[int, float], plain_seconds: float | None, budget: int) -> None:
        if budget < 0 or 0 not in seconds:
            raise UserError(f"tree=auto: needs a budget of at least 0 (is {budget}) and the step time of 0 nodes")
        self.sizes = sorted(n for n in seconds if n <= budget)
        self.seconds = [seconds[n] for n in self.sizes]
        self.plain_seconds = seconds[0] if plain_seconds is None else plain_seconds
        self.reset()

    @property
    def largest(self) -> int:
        """The index of the largest size that may be chosen now."""
        return len(self.sizes) - 1

    def reset(self) -> None:
        """No step was taken yet."""
        self.used, self.predicted = [0] * len(self.sizes), [0.0, 0.0]

    def count(self, index: int, tokens: float) -> None:
        """A step of the size of that index, of which so many tokens are expected."""
        self.used[index] += 1
        self.predicted[0] += tokens
        self.predicted[1] += self.seconds[index]

    def speedups(self, tokens: Sequence[float]) -> list[float]:
        """Speed by size, over plain decoding on the same engine, where a step of each size adds so many tokens."""
        return [self.plain_seconds * n / t for n, t in zip(tokens, self.seconds, strict=True)]

    def load(self, used: list[int], predicted: list[float]) -> bool:
        """Go on from saved counts; True. Raises UserError if they are of other sizes."""
        if len(used) != len(self.sizes):
            raise UserError("tree=auto: the saved state considered other sizes; start from another one or cold")
        self.used, self.predicted = used, predicted
        return True

    def promised(self, tokens: Sequence[float], accepted: Sequence[float], **chosen: Any) -> dict[str, Any]:
        """What was measured, chosen and promised.

        Args:
            tokens, accepted: expected of a step, by size: all it adds, and its drafts alone.
            chosen: which size it was.
        """
        made, seconds = self.predicted
        return {
            "sizes": self.sizes,
            "step_seconds": self.seconds,
            "plain_seconds": self.plain_seconds,
            "expected_accepted": accepted,
            "predicted_speedup_by_size": self.speedups(tokens),
            **chosen,
            "steps_by_size": self.used,
            "predicted_speedup": self.plain_seconds * made / seconds if seconds else None,
        }


def best_size(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """The index of the size whose steps add most tokens a second."""
    return max(range(len(tokens)), key=lambda i: tokens[i] / seconds[i])


def between(seconds: Mapping[int, float], n: int) -> float:
    """T(n) on the straight line between the measured sizes about it; the ends beyond them."""
    below = max((size for size in seconds if size <= n), default=min(seconds))
    above = min((size for size in seconds if size >= n), default=max(seconds))
    if above <= below:
        return seconds[below]
    return seconds[below] + (seconds[above] - seconds[below]) * (n - below) / (above - below)


def sizes_on(device: torch.device) -> tuple[int, ...]:
    """Nodes below the root that are considered on a device."""
    return tuple(sorted({*SIZES, *TILED})) if device.type == "cuda" else SIZES


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
