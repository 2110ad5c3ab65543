"""Many methods on one text: each gives the answer, step by step, that it gives alone."""

import gc
import random
import weakref
from dataclasses import replace

import pytest

from evaluation.running import shared_text
from evaluation.running.shared_text import generate_together
from model.engine import LAST, Target, generate
from model.errors import UserError
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.conftest import greedy, toy_model
from tests.model.every_method import SETTINGS, V, make, write_companions
from tests.model.sessions import comparable

WITH_FILES = ("medusa", "hydra", "eagle", "eagle2", "eagle3", "samd", "sps", "rest")


@pytest.mark.parametrize(
    "kind", [pytest.param("llama-grouped", marks=pytest.mark.slow), "gpt2", "gpt-neox"]
)
def test_each_method_takes_the_steps_that_it_takes_alone(kind, tmp_path):
    model, rng = toy_model(kind), random.Random(3)
    target = Target(model)
    companions = write_companions(model, tmp_path) if kind == "llama-grouped" else {}
    names = [name for name in SETTINGS if companions or name not in WITH_FILES]
    alone, drafters = ([make(name, target, companions) for name in names] for _ in range(2))
    made = [[rng.randrange(3, V) for _ in range(1 + 17 * i)] * (1 + (i > 0)) for i in range(4)]
    for prompt in made:  # what is carried from one to the next is the same as well
        text = greedy(model, prompt, 40, [7])
        expected = [
            generate(target, drafter, prompt, max_new_tokens=40, eos={7}) for drafter in alone
        ]
        together = generate_together(target, drafters, prompt, max_new_tokens=40, eos={7})
        for name, one, other in zip(names, expected, together, strict=True):
            assert one.tokens == text, name
            assert (one.tokens, one.steps, one.stop, one.forwards) == (
                other.tokens,
                other.steps,
                other.stop,
                other.forwards,
            ), name
    for name, one, other in zip(names, alone, drafters, strict=True):
        assert comparable(one.state_dict()) == comparable(other.state_dict()), name


def forwarded(target):
    """What the target is asked from now on: the tokens of each shared forward, with the ones they come after."""
    forwards, real = [], target.forward_masked

    def noted(cache, tokens, mask, positions, **settings):
        past = cache.length
        for seen in mask == 0:
            path = tuple(tokens[i].item() for i in range(len(tokens)) if seen[past + i])
            forwards.append((int(seen[:past].sum()), path))
        return real(cache, tokens, mask, positions, **settings)

    target.forward_masked = noted
    return forwards


def test_one_row_a_token_serves_all_who_draft_nothing(llama):
    target, prompt = Target(llama), [5, 6, 7, 8] * 3
    forwards = forwarded(target)
    out = generate_together(
        target, [Vanilla(target.device) for _ in range(5)], prompt, max_new_tokens=20
    )
    assert [past for past, _ in forwards] == [len(prompt) - 1 + i for i in range(20)]
    assert all(
        answer.tokens == greedy(llama, prompt, 20) and answer.accept_lengths == [1] * 20
        for answer in out
    )


def test_nothing_is_asked_twice_but_what_stands_above_something_new(llama):
    """Trees within one another: what the smaller ones try the larger one has tried, and the other way round."""
    target, prompt = Target(llama), [5, 6, 7, 8, 9, 10] * 3
    drafters = [TokenRecycling(V, build_template("best", nodes=n)) for n in (4, 12, 24, 40)]
    alone = [generate(target, drafter, prompt, max_new_tokens=60) for drafter in drafters]
    for drafter in drafters:
        drafter.reset()
    forwards = forwarded(target)
    together = generate_together(target, drafters, prompt, max_new_tokens=60)
    assert [out.steps for out in together] == [out.steps for out in alone]
    leaves = [
        key for key in forwards if not any(o[0] == key[0] and o[1][:-1] == key[1] for o in forwards)
    ]
    assert len(set(leaves)) == len(leaves), "that below which nothing is asked is asked once"
    assert len(forwards) < 0.6 * sum(step.nodes for out in alone for step in out.steps)


def test_drafts_of_methods_that_read_nothing_of_rejected_nodes_are_not_forwarded(llama):
    """But for drafts beyond the answer's end, whose acceptance the answer does not tell."""
    target, prompt = Target(llama), [5, 6, 7, 8, 9, 10] * 3
    recycling = TokenRecycling(V, build_template("best", nodes=12))
    forwards = forwarded(target)
    generate_together(target, [recycling], prompt, max_new_tokens=60)
    alone = [*forwards]
    forwards.clear()
    recycling.reset()
    followers = [
        make(name, target, {})
        for name in ("pld", "suffix", "suffix_decoding", "logitspec", "ngram_cache")
    ]
    outs = generate_together(target, [*followers, recycling], prompt, max_new_tokens=60)
    assert forwards[: len(alone)] == alone
    assert all(
        len(path) == 1 and past >= len(prompt) - 1 + 60 for past, path in forwards[len(alone) :]
    )
    assert sum(step.nodes for out in outs[:-1] for step in out.steps) > 5 * 60, "they drafted"


@pytest.mark.parametrize("sizes", [(4, 12), (0, 40)])
def test_what_nobody_can_reach_any_more_is_freed(llama, monkeypatch, sizes):
    """Also where one takes many times the steps of another, which must not run ahead."""
    made = []
    real = shared_text.Context.__init__

    def noted(self, position, *rest, **more):
        real(self, position, *rest, **more)
        made.append(weakref.ref(self))

    monkeypatch.setattr(shared_text.Context, "__init__", noted)

    class Hidden(TokenRecycling):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.needs = replace(self.needs, hidden=(0, LAST))

    target, most, sizes_held = Target(llama), [], set()
    learn = shared_text._Answer.learn

    def counted(self, *arguments):
        alive = [context for ref in made if (context := ref()) is not None]
        most.append(len(alive))
        kept = [
            tensor
            for context in alive
            for tensor in (context.logits, context.hidden)
            if tensor is not None
        ]
        sizes_held.update((len(tensor), tensor.untyped_storage().nbytes()) for tensor in kept)
        return learn(self, *arguments)

    monkeypatch.setattr(shared_text._Answer, "learn", counted)
    drafters = [Hidden(V, build_template("best", nodes=n)) for n in sizes]
    gc.disable()  # by reference alone
    try:
        generate_together(target, drafters, [5, 6, 7, 8] * 3, max_new_tokens=150)
    finally:
        gc.enable()
    assert max(most[len(most) // 2 :]) <= 1.5 * max(most[: len(most) // 2]), (
        "late in the text no more than early"
    )
    assert max(most) <= 3 * (2 + sum(sizes))
    assert sizes_held == {(V, 4 * V), (64, 4 * 64)}, (
        "a row of logits or of states holds itself, and not its whole forward"
    )


def test_what_was_borrowed_is_given_back_after_an_error(llama):
    target = Target(llama)
    drafter = make("spine", target, {})
    drafter.grow = lambda root: 1 / 0
    with pytest.raises(ZeroDivisionError):
        generate_together(target, [Vanilla(target.device), drafter], [5, 6, 7], max_new_tokens=9)
    assert (
        len(target.caches._free) == 1
        and drafter.history.borrowed_length is None
        and not target.model.get_decoder()._forward_hooks
    )
    with pytest.raises(UserError, match="max_new_tokens"):
        generate_together(target, [Vanilla(target.device)], [5], max_new_tokens=0)
