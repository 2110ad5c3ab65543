"""Uncertainty of a figure: the standard deviation over repeats, and the 95 % bootstrap interval.

A MAT depends on the bench's questions, which are drawn with replacement, each with all its repeats.
A speed also depends on the machine, which drifts: repeats are drawn, too, and a method's repeat is
paired with the same repeat of its baseline. With one repeat, the drift is unknown.

Draws from few questions or repeats vary less than questions or repeats do. So intervals are widened
as in Student's t: a draw's deviation is scaled by `wider(n)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 0.95
SEED = 0
FEWEST = 8  # questions

Floats = NDArray[np.float64]


@lru_cache(maxsize=32)
def draws(n: int) -> Floats:
    """How often each of n questions is drawn, the same for every method: (RESAMPLES, n)."""
    indices = np.random.default_rng(SEED).integers(0, n, (RESAMPLES, n))
    offsets = indices + n * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(offsets.ravel(), minlength=RESAMPLES * n)
    return counts.reshape(RESAMPLES, n).astype(np.float64)


@lru_cache(maxsize=32)
def repeat_draws(n: int) -> Floats:
    """How often each of n repeats is drawn: (RESAMPLES, n)."""
    random = np.random.default_rng(SEED + 1)
    return random.multinomial(n, [1 / n] * n, RESAMPLES).astype(np.float64)


@lru_cache(maxsize=64)
def wider(n: int) -> Floats:
    """Sample sqrt(n / chi squared with n - 1 degrees of freedom): (RESAMPLES,)."""
    random = np.random.default_rng(SEED + 2)
    spread: Floats = np.sqrt(n / random.chisquare(n - 1, RESAMPLES))
    return spread


def _ends(figures: Floats) -> tuple[float, float]:
    finite = figures[np.isfinite(figures)]
    if not len(finite):
        return math.nan, math.nan
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def speed_interval(*columns: Floats, alike: bool = True) -> tuple[float, float]:
    """Return the interval of a `quotient` over questions and, with two or more, over repeats.

    Args:
        columns: two or four, (n, R): a question's value in each repeat, NaN if it has none.
        alike: whether all questions weigh the same, however many repeats they have.

    Returns (NaN, NaN) with fewer than FEWEST questions.
    """
    # Leave out questions and repeats without a value.
    finite = np.all(np.isfinite(columns), axis=0)  # (n, R)
    some = np.ix_(finite.any(axis=1), finite.any(axis=0))
    finite = finite[some]
    known = [column[some] for column in columns]

    questions, repeats = finite.shape
    if repeats == 1:
        return quotient_interval(*(column.ravel() for column in known))
    if repeats < 1 or questions < FEWEST:
        return math.nan, math.nan

    # Draw questions and repeats together, then each alone.
    weights = finite * (repeats / finite.sum(axis=1, keepdims=True)) if alike else finite
    cells = np.where(finite, np.stack(known), 0.0) * weights  # (2 or 4, n, R)
    by_question = draws(questions) @ cells  # (2 or 4, RESAMPLES, R)
    drawn_both = np.einsum("cbr,br->cb", by_question, repeat_draws(repeats))
    drawn_repeats = cells.sum(axis=1) @ repeat_draws(repeats).T
    drawn_questions = by_question.sum(axis=2)

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        middle = _quotient(cells.sum(axis=(1, 2)))
        figures = _quotient(drawn_both)
        for alone, n in ((drawn_repeats, repeats), (drawn_questions, questions)):
            figures = figures * (_quotient(alone) / middle) ** (wider(n) - 1)
        return _ends(figures)


def quotient_interval(*columns: Floats) -> tuple[float, float]:
    """Return the interval of a `quotient` of two or four columns of n questions, or (NaN, NaN).

    Questions with a NaN are left out.
    """
    together = np.stack(columns, axis=1)  # (n, 2 or 4)
    together = together[np.isfinite(together).all(axis=1)]
    questions = len(together)
    if questions < FEWEST:
        return math.nan, math.nan

    all_of_them = together.sum(axis=0)
    sums = np.vstack([all_of_them, draws(questions) @ together]).T  # (2 or 4, 1 + RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        figures = _quotient(sums)
        return _ends(figures[0] * (figures[1:] / figures[0]) ** wider(questions))


def _quotient(sums: Floats) -> Any:
    first = sums[0] / sums[1]
    return first / (sums[2] / sums[3]) if len(sums) > 2 else first


def quotient(*columns: Floats, alike: bool = False) -> float:
    """Return sum a / sum b, or of four columns (sum a / sum b) / (sum c / sum d), or NaN.

    Values that are NaN are left out; where columns are paired, all of them have NaN there. With
    `alike`, the means of rows are summed, so that all questions weigh the same.
    """
    summed = map(row_means, columns) if alike else columns
    sums = np.array([np.nansum(values) for values in summed])
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(_quotient(sums))
    return value if math.isfinite(value) else math.nan


def row_means(values: Floats) -> Floats:
    """Return the mean of each row's finite values, NaN of none: (n, R) to (n,)."""
    finite = np.isfinite(values)
    total: Floats = np.where(finite, values, 0.0).sum(axis=1)
    total[~finite.any(axis=1)] = np.nan
    total /= np.maximum(finite.sum(axis=1), 1)
    return total


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n - 1) of the finite values; NaN of fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan


def spans_one(low: float, high: float) -> bool:
    return low <= 1.0 <= high and low < high
