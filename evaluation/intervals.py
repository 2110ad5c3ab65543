"""How sure a figure is: the standard deviation over repeats, the 95 % bootstrap interval over questions.

The interval says how much a figure hangs on which questions the bench happens to have. Questions are drawn with
replacement, each with everything that belongs to it: all its repeats, and for a speedup its time in the baseline (so it
is paired by question). Of the resampled figures the 2.5th and 97.5th percentiles are the interval.
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
    """How often each of n questions is drawn: (RESAMPLES, n), the same for every method, as it is seeded."""
    drawn = np.random.default_rng(SEED).integers(0, n, (RESAMPLES, n))
    offsets = drawn + n * np.arange(RESAMPLES)[:, None]
    return np.bincount(offsets.ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n).astype(np.float64)


def ratio_interval(numerators: Iterable[float], denominators: Iterable[float]) -> tuple[float, float]:
    """The interval of sum(numerators) / sum(denominators), one pair a question.

    MAT: tokens over steps. A mean: values over ones. A speedup: speeds over the baseline's speeds.
    Questions with a NaN in either are left out; (NaN, NaN) of fewer than two.
    """
    pairs = np.array([list(numerators), list(denominators)], dtype=np.float64).T
    pairs = pairs[np.isfinite(pairs).all(axis=1)]  # (n, 2)
    if len(pairs) < 2:
        return math.nan, math.nan
    sums = draws(len(pairs)) @ pairs  # (RESAMPLES, 2)
    ratios = sums[:, 0] / np.where(sums[:, 1] == 0, np.nan, sums[:, 1])
    if np.isnan(ratios).all():
        return math.nan, math.nan
    low, high = np.nanquantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def quotient_interval(*columns: Floats) -> tuple[float, float]:
    """The interval of (sum a / sum b) / (sum c / sum d), paired: one value of each column a question.

    One method's MAT over another's: their tokens and steps.
    """
    together = np.stack(columns, axis=1)  # (n, 4)
    if len(together) < 2:
        return math.nan, math.nan
    a, b, c, d = (draws(len(together)) @ together).T  # (RESAMPLES,) each
    low, high = np.quantile((a / b) / (c / d), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1) of the finite values; NaN of fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan


def spans_one(low: float, high: float) -> bool:
    """Whether an interval leaves open which of two is faster; not where both ends are 1, the baseline itself."""
    return low <= 1.0 <= high and low < high
