"""The tree for the machine: it follows step times and acceptance, and changes no output."""

import random

import pytest
import torch

from model.auto import LEARN, SIZES, AutoRecycling, measure_step_seconds, nested_order
from model.decoding import Draft, Target, Verification, decode
from model.errors import UserError
from model.recycling import build_template
from model.recycling.templates import likelihood
from tests.conftest import greedy, toy_model

V = 61
FREE = dict.fromkeys(SIZES, 1.0)  # nodes cost nothing
DEAR = {n: 1.0 + n for n in SIZES}  # a node costs as much as a step


def step(drafter, accepted):
    """One made-up step in which the path `accepted` stands."""
    tree = drafter.draft(5).tree
    node = max(i for i, path in enumerate(tree.rank_paths) if path == accepted[: len(path)])
    tokens = torch.zeros(len(tree), dtype=torch.long)
    drafter.observe(Verification(Draft(tree, tokens), tokens, node, [1], torch.zeros(len(tree), V)))
    return len(tree) - 1


@pytest.mark.parametrize("seconds", [FREE, DEAR, {n: 1 + n / 30 for n in SIZES}])
def test_the_output_is_the_targets_own(seconds):
    model, rng = toy_model("llama"), random.Random(0)
    target, drafter = Target(model), AutoRecycling(V, step_seconds=seconds)
    for _ in range(3):
        prompt = [rng.randrange(3, V) for _ in range(6)]
        out = decode(target, drafter, prompt, max_new_tokens=80)
        assert out.tokens == greedy(model, prompt, 80)
        assert sum(out.accept_lengths) == 80


def test_free_nodes_give_the_largest_tree_and_the_budget_holds():
    for budget, largest in ((80, 80), (30, 24), (0, 0)):
        drafter = AutoRecycling(V, step_seconds=FREE, budget=budget)
        used = [step(drafter, (0, 0, 0)) for _ in range(60)]
        assert max(used) == largest and used[-1] == largest


def test_it_steps_aside_where_nothing_is_accepted_and_comes_back_where_it_pays():
    drafter = AutoRecycling(V, step_seconds={n: 1 + n / 20 for n in SIZES})
    used = [step(drafter, ()) for _ in range(400)]
    assert sum(used[200:]) / 200 < 0.5, "plain decoding, but for a few probes"
    used = [step(drafter, (0, 0, 0, 0)) for _ in range(1200)]
    assert used[-1] > 0


def test_what_smaller_trees_would_have_accepted_is_counted_by_hand():
    drafter = AutoRecycling(V, step_seconds=FREE, budget=4)
    assert drafter.sizes == [0, 2, 4]
    order = nested_order(None, 4, 8)
    assert order == ((0,), (0, 0), (1,), (0, 0, 0))
    before = drafter._sums[2] * (1 - 1 / 256)
    assert step(drafter, (0, 0, 0)) == 4
    # the whole path lies in the four nodes, its first two nodes in the two, none in the root alone
    assert (drafter._sums[2] - before).tolist() == pytest.approx([0.0, 2.0, 3.0])


def test_the_choice_is_the_greatest_expected_speed():
    seconds = {n: 1 + n / 40 for n in SIZES}
    drafter = AutoRecycling(V, step_seconds=seconds)
    for _ in range(300):
        step(drafter, (0,))  # one draft stands whatever the size: more than two nodes cannot pay
    assert drafter.size == 2
    assert drafter.expected()[1] == pytest.approx(1.0, abs=0.05)
    assert drafter.predicted_speedup()[1] == pytest.approx(2.0 / 1.05, abs=0.1)


def test_a_resumed_drafter_goes_on_with_the_same_choices():
    seconds = {n: 1 + n / 25 for n in SIZES}
    rng = random.Random(3)
    paths = [tuple(0 for _ in range(rng.randrange(5))) for _ in range(120)]
    whole = AutoRecycling(V, step_seconds=seconds)
    used = [step(whole, path) for path in paths]
    first, second = AutoRecycling(V, step_seconds=seconds), AutoRecycling(V, step_seconds=seconds)
    part = [step(first, path) for path in paths[:50]]
    second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()})
    assert part + [step(second, path) for path in paths[50:]] == used
    second.reset()
    assert [step(second, path) for path in paths[:50]] == part, "a cold start forgets what was learnt"


def test_a_profile_orders_the_nodes_and_unknown_ones_follow():
    profile = {(1,): 0.9, (0,): 0.5, (1, 0): 0.8, (1, 9): 0.85}
    assert nested_order(profile, 4, k=8) == ((1,), (1, 0), (0,), (0, 0))
    drafter = AutoRecycling(V, step_seconds=FREE, profile=profile, budget=2)
    assert drafter.prior.tolist() == pytest.approx([0.0, 1.7])
    assert drafter.largest.rank_paths == [(), (1,), (1, 0)]


def test_without_a_profile_the_order_is_the_published_trees():
    assert set(nested_order(None, 80, 8)) == set(build_template("2.2.2").rank_paths[1:])
    likely = [likelihood(path) for path in nested_order(None, 80, 8)]
    assert likely == sorted(likely, reverse=True)


def test_step_times_are_measured_for_every_size_within_the_budget():
    seconds = measure_step_seconds(Target(toy_model("llama")), [5, 6, 7], budget=8, k=8, tokens=6, rounds=1)
    assert list(seconds) == [0, 2, 4, 6, 8] and all(s > 0 for s in seconds.values())


@pytest.mark.parametrize("wrong", [dict(step_seconds={2: 1.0}), dict(step_seconds=FREE, budget=-1)])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(UserError, match="tree=auto"):
        AutoRecycling(V, **wrong)


def test_learning_comes_first():
    drafter = AutoRecycling(V, step_seconds=DEAR)
    assert [step(drafter, ()) for _ in range(LEARN)] == [24] * LEARN
