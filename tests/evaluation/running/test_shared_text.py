"""Many methods on one text: each gives the answer, step by step, that it gives alone."""

import random

import pytest

from evaluation.running.shared_text import generate_together
from model.engine import Target, generate
from model.methods.vanilla import Vanilla
from tests.conftest import greedy, toy_model
from tests.model.every_method import SETTINGS, V, make, write_companions
from tests.model.sessions import comparable

WITH_FILES = ("medusa", "hydra", "eagle", "eagle2", "eagle3", "samd", "sps", "rest")
PROMPT = [5, 6, 7, 8, 9, 10] * 3


@pytest.mark.parametrize("kind", [pytest.param("llama-grouped", marks=pytest.mark.slow), "gpt2"])
def test_each_method_takes_the_steps_that_it_takes_alone(kind, tmp_path):
    model = toy_model(kind)
    rng = random.Random(3)
    target = Target(model)
    companions = write_companions(model, tmp_path) if kind == "llama-grouped" else {}
    names = [name for name in SETTINGS if companions or name not in WITH_FILES]
    alone, drafters = ([make(name, target, companions) for name in names] for _ in range(2))
    for length in (1, 18, 35):  # what is kept from one to the next is the same as well
        prompt = [rng.randrange(3, V) for _ in range(length)] * 2
        settings = {"max_new_tokens": 20, "eos": {7}}
        text = greedy(model, prompt, 20, [7])
        together = generate_together(target, drafters, prompt, **settings)
        for name, drafter, other in zip(names, alone, together, strict=True):
            one = generate(target, drafter, prompt, **settings)
            assert one.tokens == other.tokens == text, name
            assert (one.steps, one.stop, one.forwards) == (
                other.steps,
                other.stop,
                other.forwards,
            ), name
    for name, one, other in zip(names, alone, drafters, strict=True):
        assert comparable(one.state_dict()) == comparable(other.state_dict()), name


def forwarded(target):
    """What the target is asked from now on: each row's path after the committed tokens it sees."""
    forwards = []
    real = target.forward_masked

    def noted(cache, tokens, mask, positions, **settings):
        past = cache.length
        for seen in mask == 0:
            path = tuple(token for token, is_seen in zip(tokens.tolist(), seen[past:], strict=True) if is_seen)  # fmt: skip
            forwards.append((int(seen[:past].sum()), path))
        return real(cache, tokens, mask, positions, **settings)

    target.forward_masked = noted
    return forwards


def test_one_row_a_token_serves_all_who_draft_nothing(llama):
    target = Target(llama)
    forwards = forwarded(target)
    drafters = [Vanilla(target.device) for _ in range(5)]
    outs = generate_together(target, drafters, PROMPT, max_new_tokens=20)
    assert [past for past, _ in forwards] == [len(PROMPT) - 1 + i for i in range(20)]
    assert all(out.tokens == greedy(llama, PROMPT, 20) for out in outs)


def test_what_was_borrowed_is_given_back_after_an_error(llama):
    target = Target(llama)
    drafter = make("suffix with history", target, {})
    drafter.grow = lambda root: 1 / 0
    with pytest.raises(ZeroDivisionError):
        generate_together(target, [Vanilla(target.device), drafter], [5, 6, 7], max_new_tokens=9)
    assert len(target.caches._free) == 1 and drafter.history.borrowed_length is None
