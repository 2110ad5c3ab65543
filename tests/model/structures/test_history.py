"""Text kept from prompt to prompt: matched against like the prompt's own, bounded, saved, forgotten by a reset."""

import math
import random
from functools import partial

import pytest
import torch

from model.engine import Target, generate
from model.errors import UserError
from model.methods import make_method
from model.methods.dynamic import DynamicRecycling
from model.methods.logitspec import LogitSpec
from model.methods.ngram_cache import NgramCache
from model.methods.spine import Spine
from model.methods.suffix import Suffix, SuffixRecycling
from model.recycling import build_template
from model.structures.history import History, TextSession
from model.structures.ngram_table import NgramTable
from model.structures.suffix_automaton import SuffixAutomaton
from tests.conftest import greedy, toy_model
from tests.model.sessions import comparable

V = 61


MAKE = {
    "spine": partial(Spine, V, nodes=12),
    "logitspec": partial(LogitSpec, V, nodes=12),
    "suffix": partial(Suffix, V, max_draft=8),
    "suffix_recycling": partial(
        SuffixRecycling, V, build_template("best", nodes=8), min_match=2, max_draft=8
    ),
    "dynamic": partial(DynamicRecycling, V, nodes=12),
}


def text(drafter):
    return (drafter.suffix if isinstance(drafter, SuffixRecycling) else drafter).history.text


def read(history, prompt):
    method = Suffix(V)
    method.history = history
    session = TextSession(method)
    session.begin(prompt)
    return session


def test_by_hand():
    history = History(8, SuffixAutomaton, V)
    first = read(history, [1, 2, 3, 4])
    first.text.extend([5, 6])
    first.close()
    second = read(history, [9, 3, 4])
    assert second.text.tokens == [1, 2, 3, 4, 5, 6, 9, 3, 4]
    end = second.text.end
    assert (second.text.length, second.text.copy(end, 2)) == (2, [5, 6]), (
        "3 4 was followed by 5 6 in the first prompt"
    )
    second.close()
    third = read(history, [7, 3]).text  # nine tokens are more than eight: the newest four stay
    assert third.tokens == [6, 9, 3, 4, 7, 3] and (third.length, third.copy(third.end, 1)) == (
        1,
        [4],
    )
    assert read(History(0, SuffixAutomaton, V), [1, 2]).text.tokens == [1, 2]


def test_two_at_once_do_not_read_each_other_and_both_are_kept():
    history = History(100, SuffixAutomaton, V)
    before = read(history, [1, 2])
    before.close()
    one, other = read(history, [3]), read(history, [4])
    one.text.extend([5])
    other.text.extend([6])
    assert one.text.tokens == [1, 2, 3, 5] and other.text.tokens == [1, 2, 4, 6]
    other.close()
    one.close()
    assert history.state_dict()["text"].tolist() == [1, 2, 4, 6, 3, 5], "what is saved holds both"
    third = read(history, [7])
    assert third.text.tokens == [1, 2, 4, 6, 3, 5, 7]
    one.close()  # once more: it has nothing to give back, and the third one keeps the text
    others = [read(history, [8, i, i]) for i in range(50)]
    assert others[0].text is not third.text
    for session in (third, *others[:-1]):
        session.close()
    assert len(history.pending) == 100, "what is said next to a borrowed text is bounded"
    history.reset()
    others[-1].close()
    assert history.state_dict()["text"].tolist() == [], "a reset forgets what is being read, too"


def test_a_sequence_that_is_open_and_forgotten_costs_one_rebuilding():
    rebuilt = []

    def text_of(tokens):
        rebuilt.append(len(tokens := list(tokens)))
        return SuffixAutomaton(tokens)

    history = History(1000, text_of, V)
    read(history, list(range(50))).close()
    forgotten, count = read(history, [1]), sum(map(bool, rebuilt))
    for i in range(6):
        read(history, [2, i]).close()
    assert sum(map(bool, rebuilt)) - count == 1
    forgotten.text.extend([3, 4])
    assert forgotten.text.tokens[-3:] == [1, 3, 4], "it goes on with a text of its own"
    forgotten.close()
    assert read(history, [7]).text.tokens[-4:] == [1, 3, 4, 7]


def test_a_conversation_appends_what_is_new():
    history, prompt = History(1000, SuffixAutomaton, V), [1, 2, 3]
    read(history, [9, 9]).close()
    for turn in range(5):
        session = read(history, prompt)
        session.text.extend([10 + turn, 11])
        session.close()
        prompt = [*prompt, 10 + turn, 11, 20]
    assert history.text.tokens == [9, 9, *prompt[:-1]]
    other = read(history, [1, 2, 4])
    assert other.text.tokens == [9, 9, *prompt[:-1], 1, 2, 4], "another prompt is appended whole"


def test_bad_texts_are_refused_and_a_plain_matrix_is_taken():
    for name, make in MAKE.items():
        drafter = make(history_tokens=64)
        for wrong in ([3, V], [-1], [[1, 2]]):
            with pytest.raises(UserError, match="start: the saved text"):
                drafter.load_state_dict(drafter.state_dict() | {"text": torch.tensor(wrong)})
        if name in ("spine", "suffix_recycling"):
            generate(Target(toy_model("llama")), drafter, [5, 6, 7], max_new_tokens=10)
            drafter.load_state_dict({"candidates": torch.ones(V, 8, dtype=torch.int64)})
            assert text(drafter).tokens == []


@pytest.mark.parametrize("name", ["dynamic", "spine", "recycling"])
def test_a_state_that_is_refused_changes_nothing(name):
    target = Target(toy_model("llama"))
    states = []
    for seed in range(2):
        drafter = make_method(name, target, nodes="auto:8")
        rng = random.Random(seed)
        generate(target, drafter, [rng.randrange(3, V) for _ in range(20)], max_new_tokens=30)
        states.append({key: tensor.clone() for key, tensor in drafter.state_dict().items()})
    bad = [
        ("text", torch.tensor([V])),
        ("text", torch.tensor([5.5])),
        ("steps", None),
        ("order", states[0].get("order")),
    ]
    bad += [
        ("sizing", torch.full_like(states[0]["sizing"], math.nan)),
        ("weights", math.nan * states[0].get("weights", 0)),
    ]
    for key, value in [(key, value) for key, value in bad if key in states[0]]:
        damaged = {
            k: t
            for k, t in (states[0] | {key: value if key != "order" else value[None]}).items()
            if t is not None
        }
        with pytest.raises(UserError, match="start: "):
            drafter.load_state_dict(damaged)
        assert all(
            torch.equal(tensor, states[1][k]) for k, tensor in drafter.state_dict().items()
        ), key


def test_a_matrix_alone_forgets_the_choice_of_a_used_size():
    target = Target(toy_model("llama"))
    drafter, fresh = (make_method("recycling", target, nodes="auto:8") for _ in range(2))
    generate(target, drafter, [5, 6, 7], max_new_tokens=200)
    for each in (drafter, fresh):
        each.load_state_dict({"candidates": torch.ones(V, 8, dtype=torch.int64)})
    state, expected = drafter.state_dict(), fresh.state_dict()
    assert all(torch.equal(state[key], expected[key]) for key in expected if key != "sizing")
    assert torch.equal(state["sizing"][1:], expected["sizing"][1:]), (
        "step times are the machine's and stay"
    )


@pytest.mark.parametrize("way", ["eager", "static"])
@pytest.mark.parametrize("name", sorted(MAKE.keys() - {"logitspec"} | {"ngram_cache"}))
def test_what_is_carried_ends_where_the_answer_ends(name, way):
    """Drafts of a text that is known run past an end of sequence, and past the limit; what stands there is not said."""
    model, prompt = toy_model("llama"), [5, 9, 5, 9, 7]
    target = Target(model)
    free = greedy(model, prompt, 40)
    drafter = (
        NgramCache(V, leader=2, follower=2)
        if name == "ngram_cache"
        else MAKE[name](history_tokens=4096)
    )
    said: list[list[int]] = []
    ends = range(11, 31, 3)
    for new, eos in (
        (40, ()),
        (40, ()),
        *((n, ()) for n in ends),
        *((40, {free[n]}) for n in ends),
    ):
        settings = dict(max_new_tokens=new, eos=eos)
        out = generate(target, drafter, prompt, **settings, execution=way)
        assert (
            out.tokens
            == free[: next((i + 1 for i, token in enumerate(free[:new]) if token in eos), new)]
        )
        said.append(prompt + out.tokens)
    if name == "ngram_cache":
        expected = NgramTable(2, 2, capacity=32768, followers=8)
        for tokens in said:
            expected.add_text(tokens)
        assert comparable(drafter.table.state_dict()) == comparable(expected.state_dict())
    else:
        assert text(drafter).tokens == [token for tokens in said for token in tokens]
