"""Batches: each text is that of its sequence alone."""

import random

import pytest
import torch

from model.engine import Target, generate
from model.engine.batch import decode_batch
from model.engine.loop import Request
from tests.conftest import greedy, toy_model
from tests.model.every_method import V, make


def answers_of(target, drafter, prompts, size, **settings):
    steps = decode_batch(target, drafter, prompts, size, [Request(**settings)] * len(prompts))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("name", ["vanilla", "recycling", "dynamic"])
def test_slice(name, llama):
    rng = random.Random(0)
    prompts = [[rng.randrange(3, V) for _ in range(rng.choice([1, 2, 5, 30]))] for _ in range(9)]
    expected = [greedy(llama, prompt, 30) for prompt in prompts]
    for size in (1, 2, 3, 8):
        target = Target(llama)
        out = answers_of(target, make(name, target, {}), prompts, size, max_new_tokens=30)
        assert [answer.tokens for answer in out] == expected
