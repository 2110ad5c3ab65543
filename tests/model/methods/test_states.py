"""Saved states: a state that does not fit is refused and changes nothing."""

import signal
from contextlib import contextmanager
from itertools import product

import pytest
import torch

from model.engine import Target, generate
from model.errors import UserError
from model.methods import make_method
from tests.conftest import greedy, toy_model
from tests.model.every_method import V, make

AUTO = {"dynamic of auto": dict(nodes="auto:8")}
STATEFUL = [
    "dynamic",
    "recycling",
    "suffix with history",
    "logitspec",
    "goose",
    "racer",
    "ngram_cache",
    "suffix_decoding",
    *AUTO,
]
# By method: a tensor, and what damages it.
DAMAGE = {
    "racer": [
        ("trie_children", lambda nodes: nodes * 0),
        ("trie_fail", lambda links: links * 0 + 1),
        ("trie_recency", lambda nodes: nodes * 0),
        ("trie_buckets", lambda sizes: sizes * 0),
    ],
    "logitspec": [("text", lambda ids: ids + 0.5)],
    "dynamic": [
        ("counts", lambda counts: -counts),
        ("counts", lambda counts: counts.flip(0)),
        ("row_levels", lambda levels: levels + 200),
    ],
    "dynamic of auto": [("sizing", lambda rows: rows * 0)],
    "goose": [("row_scores", lambda scores: scores / 0)],
    "suffix_decoding": [
        ("answers", lambda log: log[1:]),
        ("orders", lambda tokens: tokens[:-1]),
        ("orders", lambda tokens: tokens.flip(0)),
    ],
}


def one(value):
    """Change a tensor's middle element to this value, or to the nearest that its type has."""

    def damage(tensor):
        flat = tensor.clone().reshape(-1)
        if tensor.is_floating_point():
            flat[len(flat) // 2 :][:1] = max(min(value, torch.finfo(tensor.dtype).max), -1.0)
        else:
            ends = torch.iinfo(tensor.dtype)
            flat[len(flat) // 2 :][:1] = int(max(min(value, ends.max), ends.min))
        return flat.view(tensor.shape)

    return damage


# all methods' tensors are changed in each way; what is accepted must do no harm
MUTATIONS = [
    lambda tensor: None,
    torch.zeros_like,
    lambda tensor: tensor.double() if not tensor.is_floating_point() else tensor.long(),
    lambda tensor: tensor.to(torch.complex64),
    lambda tensor: tensor.bool(),
    lambda tensor: -tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64) - 2,
    lambda tensor: tensor.reshape(-1, 1, 1),
    lambda tensor: tensor[:-1],
    lambda tensor: tensor[:0],
    lambda tensor: torch.cat((tensor, tensor)),
    lambda tensor: tensor.flip(0),
    lambda tensor: tensor[torch.randperm(len(tensor), generator=torch.Generator().manual_seed(0))],
    one(1),
    one(float(V)),
    one(1e300),
    one(-1),
]
PROMPT = [5, 6, 7, 5, 6]


def made(name, target):
    return (
        make_method(name.split()[0], target, **AUTO[name])
        if name in AUTO
        else make(name, target, {})
    )


def copied(drafter):
    return {key: tensor.clone() for key, tensor in drafter.state_dict().items()}


def filled(name, target):
    """A drafter that has learnt, and its state before it learnt more."""
    drafter = made(name, target)
    generate(target, drafter, PROMPT * 3, max_new_tokens=40)
    state = copied(drafter)
    generate(target, drafter, PROMPT[1:], max_new_tokens=20)
    return drafter, state


@contextmanager
def ends_in(seconds):
    """Raise what hangs."""

    def stop(*signalled):
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def target():
    return Target(toy_model("llama"))


def refused(drafter, state):
    """True if it is, and nothing has changed."""
    before = copied(drafter)
    try:
        drafter.load_state_dict(state)
    except UserError as error:
        assert str(error).startswith("start: ") and "\n" not in str(error)
        after = drafter.state_dict()
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
        return True
    return False


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_changed_in_any_way_is_refused_or_does_no_harm(name, target):
    expected = greedy(target.model, PROMPT, 12)
    drafter, state = filled(name, target)
    assert not refused(drafter, state)
    for key, damage in DAMAGE.get(name, ()):
        assert refused(drafter, state | {key: damage(state[key])}), key
    accepted = 0
    for key, mutate in product(state, MUTATIONS):
        mutated = mutate(state[key])
        rest = {other: tensor for other, tensor in state.items() if other != key}
        if not refused(drafter, rest if mutated is None else rest | {key: mutated}):
            accepted += 1
            with ends_in(20):
                answer = generate(target, drafter, PROMPT, max_new_tokens=12)
                assert answer.tokens == expected, key
    assert accepted, "or no answer was tried"
