"""What a step of n nodes takes: measured, never falling, and between what was measured."""

import itertools

import pytest
import torch

from model.decoding import Generation, StepRecord, Target
from model.recycling.auto import AutoRecycling, best_of
from model.sizing import draft_size
from model.sizing.draft_size import SIZES, best_size, between, measure_step_seconds, rising, sizes_on
from tests.conftest import toy_model


def made(n):
    return best_of(Target(toy_model("llama")), 8, n)


def test_step_times_are_measured_for_every_size_within_the_budget():
    target = Target(toy_model("llama"))
    plain, seconds = measure_step_seconds(target, [5, 6, 7], made, budget=8, tokens=6, rounds=1)
    assert list(seconds) == [0, 1, 2, 3, 4, 6, 8] and plain > 0
    times = [plain, *seconds.values()]
    assert times == sorted(times), "whatever the clock said, more work never takes less"


@pytest.mark.parametrize(
    ("ratios", "curve"),
    [
        ([1.0, 1.2, 1.5], [1.0, 1.2, 1.5]),
        ([0.9, 1.2, 1.1], [1.0, 1.15, 1.15]),
        ([1.0, 2.0, 1.2, 1.4], [1.0, 1.6, 1.6, 1.7]),  # one that is too slow moves what follows by half as much
    ],
)
def test_step_times_rise_whatever_the_noise(ratios, curve):
    assert rising(ratios) == pytest.approx(curve)


def test_a_runs_first_steps_are_not_timed(monkeypatch):
    """After steps of another size the first ones are slower; what counts is how long they take from then on."""
    clock = iter(itertools.count())

    def generate(target, drafter, prompt, *, max_new_tokens, mark=lambda phase: None):
        if max_new_tokens == 8:  # the warm-up
            return Generation([5] * 8, [StepRecord([5], 1, ())] * 8)
        for phase in ["prefill", *["draft", "loop"] * 12]:
            mark(phase)

    ticks = [100.0, 50.0, 9.0, 9.0, *[2.0] * 8]  # seconds of the steps
    ends = [0.0, *itertools.accumulate(ticks)]
    monkeypatch.setattr(draft_size, "generate", generate)
    monkeypatch.setattr(draft_size.time, "perf_counter", lambda: ends[next(clock) % len(ends)])
    plain, seconds = measure_step_seconds(Target(toy_model("llama")), [5, 6], made, budget=4, rounds=2)
    assert plain == 2.0 and set(seconds.values()) == {2.0}


@pytest.mark.parametrize(("step", "expected"), [(0.001, (48, 5)), (0.16, (15, 5)), (2.0, (12, 2))])
def test_a_slow_model_is_measured_by_less(monkeypatch, step, expected):
    """Five ways to decode in 60 seconds: 48 tokens in five rounds would take 1.2, 192 and 2,400."""
    asked = []

    def generate(target, drafter, prompt, *, max_new_tokens, mark=None):
        if mark is not None:
            asked.append(max_new_tokens)
            for _ in range(1 + max_new_tokens):
                mark("loop")
        steps = [StepRecord([5], 1, ())] * max_new_tokens
        return Generation([5] * max_new_tokens, steps, "length", max_new_tokens, 0.0, step * (max_new_tokens - 1))

    monkeypatch.setattr(draft_size, "generate", generate)
    measure_step_seconds(Target(toy_model("llama")), [5, 6], made, budget=3)
    assert set(asked) == {expected[0]} and len(asked) == 5 * expected[1]


def test_a_gpus_sizes_fill_its_tiles():
    assert sizes_on(torch.device("cpu")) == SIZES
    found = sizes_on(torch.device("cuda"))
    assert {*SIZES, 7, 15, 31, 63, 79} == set(found) and list(found) == sorted(found)
    assert AutoRecycling(61, step_seconds=dict.fromkeys(found, 1.0), budget=31).sizes == [n for n in found if n <= 31]


def test_between_measured_sizes_lies_a_straight_line():
    assert between({0: 1.0, 4: 3.0}, 1) == pytest.approx(1.5)
    assert between({0: 1.0, 4: 3.0}, 4) == 3.0 and between({0: 1.0, 4: 3.0}, 9) == 3.0


def test_the_best_size_adds_most_tokens_a_second():
    assert best_size([1.0, 1.5, 2.0], [1.0, 1.2, 2.0]) == 1
    assert best_size([1.0, 1.5, 2.0], [1.0, 2.0, 3.0]) == 0
