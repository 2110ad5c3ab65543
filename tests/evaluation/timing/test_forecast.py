"""From step times to tokens a second, by hand."""

import pytest

from evaluation.timing.forecast import expected_mat, forecast, forecasts, headline
from evaluation.timing.plan import published_mat
from model.recycling.auto import PROBE_EVERY, PROBE_EVERY_IDLE

FREE = dict.fromkeys((0, 1, 7, 80), 0.01)


def test_the_law_by_hand():
    """One node stands with 0.45, the second best chain node with 0.45 ** 2; the published 80 give the MAT."""
    assert expected_mat(0, 2.7) == 1 and expected_mat(80, 2.7) == pytest.approx(2.7)
    one, two = (expected_mat(n, 2.7) - 1 for n in (1, 2))
    assert two / one == pytest.approx((0.45 + 0.45**2) / 0.45 * (3 / 2) ** 0.2)
    assert expected_mat(160, 2.7) > 2.7 and expected_mat(7, 1.0) == 1
    assert published_mat() == 2.70


def test_the_best_cut_by_hand():
    """T(n) = 10 ms + n ms: MAT 1, 1.22 and 2.7 make 100, 111 and 30 tokens a second."""
    found = forecast({0: 0.010, 1: 0.011, 80: 0.090}, 0.009, 2.7)
    assert found["best"]["nodes"] == 1
    assert found["best"]["tokens_per_second"] == pytest.approx(expected_mat(1, 2.7) / 0.011)
    assert found["published"]["tokens_per_second"] == pytest.approx(2.7 / 0.090)
    assert found["published"]["speedup"] == pytest.approx(2.7 * 0.009 / 0.090)


def test_where_nodes_are_free_the_largest_is_best_and_where_they_are_expensive_none():
    assert forecast(FREE | {160: 0.01}, 0.01, 2.7)["best"]["nodes"] == 160
    assert forecast({0: 0.01, 1: 0.02, 80: 1.0}, 0.01, 2.7)["best"]["nodes"] == 0


def test_auto_pays_for_its_probes():
    found = forecast(FREE, 0.01, 2.7)["auto"]
    assert found["nodes"] == 80 and found["tokens_per_second"] == pytest.approx(270), "there is nothing larger to probe"
    expensive = {0: 0.01, 1: 0.02, 2: 0.03, 3: 0.05, 80: 1.0}
    found = forecast(expensive, 0.01, 2.7)["auto"]
    mat = (PROBE_EVERY_IDLE - 1 + expected_mat(3, 2.7)) / PROBE_EVERY_IDLE
    assert found["nodes"] == 0 and found["mat"] == pytest.approx(mat)
    assert found["tokens_per_second"] == pytest.approx(mat * PROBE_EVERY_IDLE / ((PROBE_EVERY_IDLE - 1) * 0.01 + 0.05))
    assert PROBE_EVERY < PROBE_EVERY_IDLE


def cell(execution, plain, at_80, context=500):
    seconds = {"0": plain, "80": at_80}
    return dict(model="vicuna-7b", dtype="float16", execution=execution, context=context, plain_s=plain, step_s=seconds)


def test_the_headline_takes_the_fastest_execution_and_the_fastest_plain_decoding():
    rows = forecasts([cell("eager", 0.02, 0.03), cell("graph", 0.008, 0.01), cell("graph", 0.001, 0.001, 200)], 2.7)
    told = headline(rows, 2.7)
    assert told.startswith("On this device: 2.2.2 at MAT 2.70: 270 tokens/s, 2.16 x plain; the best tree has 80 nodes")
    assert "vicuna-7b, float16, 500 tokens of context, graph" in told
    assert "nothing can be said" in headline([], 2.7)
