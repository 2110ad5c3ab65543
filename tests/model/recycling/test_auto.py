"""The tree for the machine: it follows step times and acceptance, and changes no output."""

import random

import pytest
import torch

from model.decoding import Draft, Target, Tree, Verification, generate
from model.errors import UserError
from model.recycling import build_template
from model.recycling.acceptance import MEMORY_VISITS, PATH_PRIOR, RANK_PRIOR, Acceptance
from model.recycling.auto import LEARN_STEPS, AutoRecycling, considered_paths, is_reorder
from model.recycling.templates import best_order, likelihood
from model.sizing.draft_size import FILLING, SIZES
from tests.conftest import greedy, toy_model

V = 61
FREE = dict.fromkeys(SIZES, 1.0)  # nodes cost nothing
EXPENSIVE = {n: 1.0 + n for n in SIZES}  # a node costs as much as a step


def step(drafter, accepted):
    """One made-up step in which the path `accepted` is accepted."""
    session = drafter.session()
    tree = session.draft(5).tree
    node = max(i for i, path in enumerate(tree.rank_paths) if path == accepted[: len(path)])
    tokens = torch.zeros(len(tree), dtype=torch.long)
    accepted_nodes = tree.ancestors[node]
    candidates = torch.zeros(len(tree), 8, dtype=torch.long)
    session.observe(Verification(Draft(tree, tokens), tokens, accepted_nodes, node, [1], candidates=candidates))
    return len(tree) - 1


@pytest.mark.parametrize("seconds", [FREE, EXPENSIVE, {n: 1 + n / 30 for n in SIZES}])
def test_the_output_is_the_targets_own(seconds):
    model, rng = toy_model("llama"), random.Random(0)
    target, drafter = Target(model), AutoRecycling(V, step_seconds=seconds)
    for _ in range(3):
        prompt = [rng.randrange(3, V) for _ in range(6)]
        out = generate(target, drafter, prompt, max_new_tokens=80)
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


def test_a_step_is_counted_by_hand():
    acceptance = Acceptance([(0,), (1,), (0, 0), (0, 1)])
    tree = Tree.from_rank_paths([(0,), (1,), (0, 0), (0, 1)])
    law = [likelihood((0,)), likelihood((1,))]
    assert acceptance.probabilities() == pytest.approx([law[0], law[1], law[0] ** 2, law[0] * law[1]])
    acceptance.update(tree, tree.rank_paths.index((0, 1)))
    # visited once each, as their parents were accepted: (0,) accepted, (1,) not, (0, 0) not, (0, 1) accepted
    keep = 1 - 1 / MEMORY_VISITS
    by_rank = []
    for rank, hits in ((0, (1, 0)), (1, (0, 1))):
        visits, accepted = RANK_PRIOR, RANK_PRIOR * law[rank]
        for hit in hits:
            visits, accepted = visits * keep + 1, accepted * keep + hit
        by_rank.append(accepted / visits)
    c = [(hit + PATH_PRIOR * by_rank[rank]) / (1 + PATH_PRIOR) for hit, rank in ((1, 0), (0, 1), (0, 0), (1, 1))]
    assert acceptance.probabilities() == pytest.approx([c[0], c[1], c[0] * c[2], c[0] * c[3]])


def test_what_hangs_below_a_fallen_node_is_not_counted():
    acceptance = Acceptance([(0,), (0, 0)])
    tree = Tree.from_rank_paths([(0,), (0, 0)])
    for _ in range(50):
        acceptance.update(tree, 0)
    assert acceptance.state_dict()["path_counts"][0].tolist() == [
        pytest.approx(MEMORY_VISITS * (1 - (1 - 1 / MEMORY_VISITS) ** 50)),
        0.0,
    ]


def test_learnt_shares_come_near_the_true_ones():
    rng, tree = random.Random(1), build_template("2.2.2")
    truth = {path: 0.8 / (path[-1] + 1) ** 2 for path in tree.rank_paths[1:]}
    acceptance, children = Acceptance(considered_paths(8)), {}
    for i, path in enumerate(tree.rank_paths[1:], start=1):
        children.setdefault(path[:-1], []).append((i, path))
    for _ in range(4000):
        node, path = 0, ()
        while True:
            draw = rng.random()
            for child, below in children.get(path, []):
                draw -= truth[below]
                if draw < 0:
                    node, path = child, below
                    break
            else:
                break
        acceptance.update(tree, node)
    learnt = dict(zip(acceptance.rank_paths, acceptance.probabilities(), strict=True))
    assert learnt[0,] == pytest.approx(0.8, abs=0.08)
    assert learnt[0, 0] == pytest.approx(0.64, abs=0.1)
    assert learnt[1,] == pytest.approx(0.2, abs=0.08)


def test_the_choice_is_the_greatest_expected_speed():
    seconds = {n: 1 + n / 5 for n in SIZES}
    drafter = AutoRecycling(V, step_seconds=seconds)
    for _ in range(1500):
        step(drafter, (0,))  # one draft is accepted whatever the size: more than one node cannot pay
    assert drafter.size == 1
    assert drafter.expected()[1] == pytest.approx(1.0, abs=0.1)
    assert drafter.predicted_speedup()[1] == pytest.approx(2.0 / 1.2, abs=0.1)


def test_larger_trees_are_credited_with_the_fuller_matrix_they_make():
    drafter = AutoRecycling(V, step_seconds={0: 1.0, 2: 1.0, 8: 50.0}, budget=8)
    for _ in range(3000):
        step(drafter, (0,))
    assert drafter.size == 2
    small, large = drafter.expected()[1:]
    below = dict(zip(drafter.acceptance.rank_paths, drafter.acceptance.probabilities(), strict=True))
    nodes = [tuple(p) for p in drafter.acceptance.rank_paths]
    assert small == pytest.approx(sum(below[p] for p in [(0,), (0, 0)] if p in nodes), rel=0.1)
    cut = sum(sorted(below.values(), reverse=True)[:8])
    assert large / cut == pytest.approx((9 / 3) ** FILLING, rel=0.05)


def test_an_empty_matrix_is_not_mistaken_for_text_that_does_not_repeat():
    drafter = AutoRecycling(V, step_seconds={0: 1.0, 4: 1.5}, budget=4)
    rng = random.Random(0)
    used = [step(drafter, (0,) if rng.random() < 0.35 else ()) for _ in range(2000)]
    # 1.35 / 1.5 does not pay now; with what 1024 steps would add, (1 + 0.35 * 1.8) / 1.5 did at step 60
    assert set(used[:60]) == {4}, "as the matrix is still filling"
    assert drafter.size == 0, "it has filled, and it still does not pay"


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


def test_it_starts_with_the_published_trees_nodes():
    assert set(best_order(80, 8)) == set(build_template("2.2.2").rank_paths[1:])
    assert set(AutoRecycling(V, step_seconds=FREE).largest.rank_paths[1:]) == set(best_order(80, 8))


def test_the_order_is_learnt():
    """Second candidates alone stand here, which the published order has late."""
    drafter = AutoRecycling(V, step_seconds={n: 1 + n / 3 for n in SIZES})
    for _ in range(600):
        step(drafter, (1, 1))
    assert [tuple(p) for p in drafter.describe()["chosen_nodes"]][:2] == [(1,), (1, 1)]
    assert [s for s in range(3000) if is_reorder(s)] == [32, 128, 512, 2048]


def test_the_prediction_is_tokens_over_seconds_of_the_steps_made():
    drafter = AutoRecycling(V, step_seconds={n: 1 + n / 40 for n in SIZES}, plain_seconds=0.9)
    tokens = seconds = 0.0
    for _ in range(200):
        drafter.choose()
        expected = dict(zip(drafter.sizes, drafter.expected(), strict=True))
        nodes = step(drafter, (0, 0))
        tokens, seconds = tokens + 1 + expected[nodes], seconds + 1 + nodes / 40
    described = drafter.describe()
    assert described["predicted_speedup"] == pytest.approx(0.9 * tokens / seconds)
    assert sum(described["steps_by_size"]) == 200


@pytest.mark.parametrize("wrong", [dict(step_seconds={2: 1.0}), dict(step_seconds=FREE, budget=-1)])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(UserError, match="tree=auto"):
        AutoRecycling(V, **wrong)


def test_learning_comes_first():
    drafter = AutoRecycling(V, step_seconds=EXPENSIVE)
    assert [step(drafter, ()) for _ in range(LEARN_STEPS)] == [24] * LEARN_STEPS
