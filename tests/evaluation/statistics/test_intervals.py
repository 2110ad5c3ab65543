"""Intervals: against a slow bootstrap, and against the truth where it is known."""

import math

import numpy as np
import pytest

from evaluation.statistics import intervals
from evaluation.statistics.intervals import (
    FEWEST,
    RESAMPLES,
    SEED,
    draws,
    quotient_interval,
    repeat_draws,
    speed_interval,
    wider,
)


def test_what_is_the_same_for_every_question_is_sure_and_of_few_nothing_is():
    ones = np.ones(FEWEST)
    some = np.arange(1.0, FEWEST + 1)
    assert quotient_interval(2 * some, some) == pytest.approx((2.0, 2.0)), "paired"
    lacking = quotient_interval([*some, math.nan, 3], [*ones, 1, math.nan])
    assert lacking == quotient_interval(some, ones)
    for columns in ((some[1:], ones[1:]), (some, 0 * ones), ([], []), (ones[1:],) * 4):
        assert np.isnan(quotient_interval(*columns)).all()
    assert np.isnan(speed_interval(*np.ones((2, 7, 3)))).all()


def test_a_resample_without_steps_counts_for_nothing():
    """Of questions of which most have no steps, some draws have none: the interval had been NaN."""
    tokens = np.zeros(8)
    steps = np.zeros(8)
    plain = np.full(8, 5.0)
    tokens[0] = 6.0
    steps[0] = 2.0
    with np.errstate(all="raise"):
        assert quotient_interval(tokens, steps, plain, plain) == (3.0, 3.0)
        assert quotient_interval(plain, plain, tokens, steps) == pytest.approx((1 / 3, 1 / 3))
        assert quotient_interval(tokens, steps) == (3.0, 3.0)
        assert all(math.isnan(end) for end in quotient_interval(plain, plain, 0 * plain, 0 * plain))


def test_the_interval_equals_a_slow_bootstrap():
    rng = np.random.default_rng(3)
    speeds = rng.uniform(1, 5, 40)
    base = rng.uniform(1, 5, 40)
    middle = sum(speeds) / sum(base)
    drawn = np.random.default_rng(SEED).integers(0, 40, (RESAMPLES, 40))
    slow = []
    for row, scale in zip(drawn, wider(40), strict=True):
        ratio = sum(speeds[i] for i in row) / sum(base[i] for i in row)
        slow.append(middle * (ratio / middle) ** scale)
    expected = np.quantile(slow, [0.025, 0.975])
    assert quotient_interval(speeds, base) == pytest.approx(expected, abs=1e-12)


def drifting(rng, questions=40, repeats=3, drift=0.04):
    """Speeds of a method and of its baseline (questions, repeats), twice as fast but for the machine's drift."""
    base = rng.uniform(1, 5, (questions, 1)) * np.exp(rng.normal(0, 0.02, (questions, repeats)))
    speeds = 2 * base * np.exp(rng.normal(0, 0.1, (questions, 1)))
    return speeds * np.exp(rng.normal(0, drift, repeats)), base * np.exp(
        rng.normal(0, drift, repeats)
    )


def slow_speed_interval(columns, resamples, alike):
    """The same figure draw by draw, question by question, repeat by repeat."""
    questions, repeats = columns[0].shape
    both = np.isfinite(sum(columns))

    def figure(by_question, by_repeat):
        sums = [0.0] * len(columns)
        for q, r in zip(*np.nonzero(both), strict=True):
            weight = by_question[q] * by_repeat[r] / (both[q].sum() if alike else 1)
            sums = [
                total + weight * column[q, r] for total, column in zip(sums, columns, strict=True)
            ]
        return sums[0] / sums[1] / (sums[2] / sums[3] if len(sums) > 2 else 1)

    every = np.ones(questions), np.ones(repeats)
    middle = figure(*every)
    figures = []
    for i in range(resamples):
        drawn = draws(questions)[i], repeat_draws(repeats)[i]
        drift = (figure(every[0], drawn[1]) / middle) ** (wider(repeats)[i] - 1)
        choice = (figure(drawn[0], every[1]) / middle) ** (wider(questions)[i] - 1)
        figures.append(figure(*drawn) * drift * choice)
    return np.quantile(figures, [0.025, 0.975])


@pytest.mark.parametrize(
    ("missing", "alike", "pairs"), [(0, True, 1), (3, True, 1), (3, False, 1), (3, False, 2)]
)
def test_questions_and_repeats_are_drawn_together(monkeypatch, missing, alike, pairs):
    rng = np.random.default_rng(4)
    speeds, base, *more = (column for _ in range(pairs) for column in drifting(rng, questions=12))
    speeds.ravel()[:missing] = np.nan  # all of the first question
    speeds.ravel()[7 : 7 + missing] = np.nan
    kept = slice(bool(missing), None)
    for full in (draws, repeat_draws, wider):
        monkeypatch.setattr(intervals, full.__name__, lambda n, full=full: full(n)[:300])
    columns = speeds, base, *more
    slow = slow_speed_interval([column[kept] for column in columns], 300, alike)
    assert speed_interval(*columns, alike=alike) == pytest.approx(slow, rel=1e-9)


def test_repeats_are_drawn_and_widened_by_their_laws():
    """By mean and variance, as the slow figure above takes both from the same functions."""
    for n in (2, 3, 5, 12):
        drawn, chi_squared = repeat_draws(n), n / wider(n) ** 2  # with n - 1 degrees of freedom
        assert (drawn.sum(axis=1) == n).all()
        assert drawn.mean(axis=0) == pytest.approx([1] * n, abs=0.1)
        assert drawn.var(axis=0) == pytest.approx([1 - 1 / n] * n, abs=0.15)
        assert chi_squared.mean() == pytest.approx(n - 1, rel=0.1)
        assert chi_squared.var() == pytest.approx(2 * (n - 1), rel=0.2)


def test_without_drift_it_is_the_interval_over_questions():
    rng = np.random.default_rng(2)
    speeds = rng.uniform(1, 5, 30)
    base = rng.uniform(1, 5, 30)
    over_questions = quotient_interval(speeds, base)
    assert speed_interval(speeds[:, None], base[:, None]) == over_questions
    assert speed_interval(np.tile(speeds[:, None], 3), np.tile(base[:, None], 3)) == pytest.approx(
        over_questions
    )


def test_an_interval_covers_the_truth_of_few_questions():
    """As plain percentiles it held in 88 of 100 experiments with 8 questions, and in 50 with 2."""
    rng = np.random.default_rng(0)
    for n in (8, 12, 24):
        covered = 0
        for _ in range(400):
            steps = rng.integers(10, 60, n).astype(float)
            low, high = quotient_interval(steps * np.exp(rng.normal(0, 0.35, n)), steps)
            covered += low <= math.exp(0.35**2 / 2) <= high
        assert 0.92 <= covered / 400 <= 0.98, n
