"""How sure a figure is: the standard deviation over repeats, and the 95 % bootstrap interval.

A MAT hangs on which questions the bench happens to have: questions are drawn with replacement, each with all its
repeats. A speed hangs on the machine, too, which drifts from run to run: repeats are drawn with replacement as well,
a repeat of a method with the same repeat of its baseline. Of the resampled figures the 2.5th and 97.5th percentiles are
the interval. With one repeat nothing is known of the drift, and the interval is over questions only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 0.95
SEED = 0

Floats = NDArray[np.float64]


@lru_cache(maxsize=32)
def draws(n: int) -> Floats:
    """Draw how often each of n questions is taken: (RESAMPLES, n), the same for every method, as it is seeded."""
    drawn = np.random.default_rng(SEED).integers(0, n, (RESAMPLES, n))
    offsets = drawn + n * np.arange(RESAMPLES)[:, None]
    return np.bincount(offsets.ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n).astype(np.float64)


def ratio_interval(numerators: Iterable[float], denominators: Iterable[float]) -> tuple[float, float]:
    """Return the interval of sum(numerators) / sum(denominators), one pair a question.

    MAT: tokens over steps. A mean: values over ones.
    Questions with a NaN in either are left out; (NaN, NaN) of fewer than two.
    """
    pairs = np.array([list(numerators), list(denominators)], dtype=np.float64).T
    pairs = pairs[np.isfinite(pairs).all(axis=1)]  # (n, 2)
    if len(pairs) < 2:
        return math.nan, math.nan
    sums = draws(len(pairs)) @ pairs  # (RESAMPLES, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _ends(sums[:, 0] / sums[:, 1])


def _ends(figures: Floats) -> tuple[float, float]:
    """Return the percentiles of the resampled figures; a resample without one (it drew no step) is left out."""
    finite = figures[np.isfinite(figures)]
    if not len(finite):
        return math.nan, math.nan
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@lru_cache(maxsize=32)
def repeat_draws(n: int) -> tuple[Floats, Floats]:
    """Draw how often each of n repeats is taken (RESAMPLES, n), and how much wider each drift is (RESAMPLES,).

    A few repeats tell the drift's size but roughly, and draws from them spread less than it does. As in Student's t,
    the drift of a draw is therefore scaled by sqrt(n / a draw of chi squared with n - 1 degrees of freedom).
    """
    rng = np.random.default_rng(SEED + 1)
    drawn = rng.multinomial(n, [1 / n] * n, RESAMPLES).astype(np.float64)
    return drawn, np.sqrt(n / rng.chisquare(n - 1, RESAMPLES))


def speed_interval(speeds: Floats, base: Floats) -> tuple[float, float]:
    """Return the interval of a mean speed over another's, over questions and, from two repeats on, over repeats.

    Args:
        speeds, base: (n, R), a question's speed in each repeat, NaN if it has none. Ones for `base`: of `speeds`.

    Returns:
        (NaN, NaN) of fewer than two questions.
    """
    finite = np.isfinite(speeds) & np.isfinite(base)
    some = np.ix_(finite.any(axis=1), finite.any(axis=0))
    speeds, base, finite = speeds[some], base[some], finite[some]
    questions, repeats = finite.shape
    if repeats < 2 or questions < 2:
        return ratio_interval(speeds.ravel(), base.ravel())
    share = finite * (repeats / finite.sum(axis=1, keepdims=True))  # a question counts as one, whatever it lacks
    cells = np.where(finite, np.stack([speeds, base]), 0.0) * share  # (2, n, R)
    drawn, wider = repeat_draws(repeats)
    both = np.einsum("cbr,br->cb", draws(questions) @ cells, drawn)  # questions and repeats drawn: (2, RESAMPLES)
    drift = cells.sum(axis=1) @ drawn.T  # repeats drawn alone: (2, RESAMPLES)
    middle = cells.sum(axis=(1, 2))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        moved = drift[0] / drift[1] / (middle[0] / middle[1])
        return _ends(both[0] / both[1] * moved ** (wider - 1))


def quotient_interval(*columns: Floats) -> tuple[float, float]:
    """Return the interval of (sum a / sum b) / (sum c / sum d), paired: one value of each column a question.

    One method's MAT over another's: their tokens and steps.

    Returns:
        (NaN, NaN) of fewer than two questions, or where no resample has steps of both.
    """
    together = np.stack(columns, axis=1)  # (n, 4)
    if len(together) < 2:
        return math.nan, math.nan
    a, b, c, d = (draws(len(together)) @ together).T  # (RESAMPLES,) each
    with np.errstate(divide="ignore", invalid="ignore"):
        return _ends((a / b) / (c / d))


def finite_mean(values: Floats) -> float:
    """Return the mean of the finite values; NaN of none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n - 1) of the finite values; NaN of fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan


def spans_one(low: float, high: float) -> bool:
    """Return whether an interval leaves open which of two is faster; False if both ends are 1, the baseline itself."""
    return low <= 1.0 <= high and low < high
