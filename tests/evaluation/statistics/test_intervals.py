"""Intervals: against values computed by hand, against a slow bootstrap, and against the truth where it is known."""

import math

import numpy as np
import pytest

from evaluation.statistics.intervals import (
    RESAMPLES,
    SEED,
    deviation,
    draws,
    quotient_interval,
    ratio_interval,
    repeat_draws,
    spans_one,
    speed_interval,
)


def test_the_interval_of_two_questions_by_enumeration():
    # (1, 1) and (3, 1): a quarter of the draws gives 1, a half 2, a quarter 3; the percentiles are the extremes
    assert ratio_interval([1, 3], [1, 1]) == (1.0, 3.0)
    assert ratio_interval([4, 6, 8], [2, 3, 4]) == (2.0, 2.0)  # paired: twice as fast on every question
    assert all(math.isnan(end) for end in ratio_interval([1.0], [1.0]))
    assert ratio_interval([1, float("nan"), 3], [1, 1, 1]) == ratio_interval([1, 3], [1, 1])
    assert all(math.isnan(end) for end in ratio_interval([1, 2], [0, 0]))


def test_a_resample_without_steps_counts_for_nothing():
    """Of two questions of which one has no steps, a quarter of the draws have none: the interval had been NaN."""
    tokens, steps, plain = np.array([6.0, 0.0]), np.array([2.0, 0.0]), np.array([5.0, 5.0])
    with np.errstate(all="raise"):
        assert quotient_interval(tokens, steps, plain, plain) == (3.0, 3.0)
        assert quotient_interval(plain, plain, tokens, steps) == pytest.approx((1 / 3, 1 / 3))
        assert ratio_interval(tokens, steps) == (3.0, 3.0)
        for none in (quotient_interval(plain, plain, 0 * plain, 0 * plain), quotient_interval(*(plain[:1],) * 4)):
            assert all(math.isnan(end) for end in none)


def test_the_interval_equals_a_slow_bootstrap():
    rng = np.random.default_rng(3)
    speeds, base = rng.uniform(1, 5, 40), rng.uniform(1, 5, 40)
    drawn = np.random.default_rng(SEED).integers(0, 40, (RESAMPLES, 40))
    slow = sorted(sum(speeds[i] for i in row) / sum(base[i] for i in row) for row in drawn)
    low, high = ratio_interval(speeds, base)
    assert low == pytest.approx(np.quantile(slow, 0.025), abs=1e-12)
    assert high == pytest.approx(np.quantile(slow, 0.975), abs=1e-12)
    assert (draws(40).sum(axis=1) == 40).all()


def test_deviation_and_what_spans_one():
    assert deviation([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert deviation([1.0, math.nan, 3.0]) == pytest.approx(math.sqrt(2))
    assert math.isnan(deviation([1.0]))
    assert spans_one(0.9, 1.1) and not spans_one(1.0, 1.0) and not spans_one(1.01, 1.2)


def drifting(rng, questions=40, repeats=3, drift=0.04):
    """Speeds of a method and of its baseline (questions, repeats), twice as fast but for the machine's drift."""
    base = rng.uniform(1, 5, (questions, 1)) * np.exp(rng.normal(0, 0.02, (questions, repeats)))
    own = 2 * base * np.exp(rng.normal(0, 0.1, (questions, 1)))
    return own * np.exp(rng.normal(0, drift, repeats)), base * np.exp(rng.normal(0, drift, repeats))


def slow(own, base):
    """The same figure draw by draw, question by question, repeat by repeat."""
    questions, repeats = own.shape
    drawn, wider = repeat_draws(repeats)
    both = np.isfinite(own) & np.isfinite(base)

    def figure(asked, runs):
        sums = [0.0, 0.0]
        for q, q_times in enumerate(asked):
            for r, r_times in enumerate(runs):
                if both[q, r]:
                    weight = q_times * r_times / both[q].sum()
                    sums[0] += weight * own[q, r]
                    sums[1] += weight * base[q, r]
        return sums[0] / sums[1]

    all_questions, all_repeats = np.ones(questions), np.ones(repeats)
    middle = figure(all_questions, all_repeats)
    found = [
        figure(asked, runs) * (figure(all_questions, runs) / middle) ** (scale - 1)
        for asked, runs, scale in zip(draws(questions)[:300], drawn, wider, strict=False)
    ]
    return np.quantile(found, [0.025, 0.975])


@pytest.mark.parametrize("missing", [0, 3])
def test_questions_and_repeats_are_drawn_together(monkeypatch, missing):
    own, base = drifting(np.random.default_rng(4), questions=12)
    own.ravel()[:missing] = np.nan  # all of the first question
    own.ravel()[7 : 7 + missing] = np.nan
    kept = slice(bool(missing), None)
    monkeypatch.setattr("evaluation.statistics.intervals.draws", lambda n: draws(n)[:300])
    fewer = tuple(values[:300] for values in repeat_draws(3))
    monkeypatch.setattr("evaluation.statistics.intervals.repeat_draws", lambda n: fewer)
    assert speed_interval(own, base) == pytest.approx(slow(own[kept], base[kept]), rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_repeats_are_drawn_and_widened_by_their_laws(n):
    """By mean and variance, as the slow figure above takes both from the same function."""
    drawn, wider = repeat_draws(n)
    assert (drawn.sum(axis=1) == n).all()
    assert drawn.mean(axis=0) == pytest.approx([1] * n, abs=0.1)
    assert drawn.var(axis=0) == pytest.approx([1 - 1 / n] * n, abs=0.1)
    chi_squared = n / wider**2  # with n - 1 degrees of freedom
    assert chi_squared.mean() == pytest.approx(n - 1, rel=0.1)
    assert chi_squared.var() == pytest.approx(2 * (n - 1), rel=0.2)


def test_without_drift_it_is_the_interval_over_questions():
    rng = np.random.default_rng(2)
    own, base = rng.uniform(1, 5, 30), rng.uniform(1, 5, 30)
    over_questions = ratio_interval(own, base)
    assert speed_interval(own[:, None], base[:, None]) == over_questions
    assert speed_interval(np.tile(own[:, None], 3), np.tile(base[:, None], 3)) == pytest.approx(over_questions)
    lost = np.stack([own, np.full(30, np.nan)], axis=1)
    assert speed_interval(lost, np.tile(base[:, None], 2)) == over_questions, "a repeat without answers is none"
    assert all(math.isnan(end) for end in speed_interval(lost[:1], np.ones((1, 2))))
    assert all(math.isnan(end) for end in speed_interval(lost[:0], np.ones((0, 2))))


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_an_interval_covers_the_truth_where_the_machine_drifts(repeats):
    """Over questions alone it had not: 95 % that held in some 60 of 100 experiments."""
    rng = np.random.default_rng(repeats)
    truth = 2 * math.exp(0.1**2 / 2)
    covered = {"new": 0, "old": 0}
    for _ in range(200):
        own, base = drifting(rng, repeats=repeats)
        ends = {"new": speed_interval(own, base), "old": ratio_interval(own.mean(axis=1), base.mean(axis=1))}
        for name, (low, high) in ends.items():
            covered[name] += low <= truth <= high
    assert 182 <= covered["new"] <= 200, "91 to 100 of 100"
    assert covered["old"] <= 160
