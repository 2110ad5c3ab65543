"""Token Recycling against its slow reference: step by step, matrix by matrix, cold and hot."""

import random

import pytest
import torch

from model.engine import Draft, Target, Tree, Verification, generate
from model.errors import UserError
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model
from tests.model.engine.test_tree import random_tree
from tests.model.recycling.reference import Reference

V = 61


def check_turn(reference, target, drafter, prompt, limit, eos=()):
    """One prompt through both; accepted lengths must agree but for the last step, which the official loop overruns."""
    produced, lengths = reference.answer(prompt, limit, eos)
    out = generate(target, drafter, prompt, max_new_tokens=limit, eos=eos)
    assert out.tokens == produced[: len(out.tokens)]
    assert len(out.steps) == len(lengths)
    assert out.accept_lengths[:-1] == lengths[:-1]
    assert out.accept_lengths[-1] <= lengths[-1]
    return out


@pytest.mark.parametrize("seed", range(12))
def test_steps_equal_the_reference_on_random_models_and_trees(seed, form):
    rng = random.Random(seed)
    model = toy_model(rng.choice(["llama", "llama-grouped", "gpt2", "gpt-neox"]), seed=seed)
    k = rng.choice([1, 2, 4, 8])
    tree = random_tree(rng.randrange(1, 25), rng, k) if k > 1 else Tree.chain(rng.randrange(1, 6))
    target, drafter = Target(model), TokenRecycling(V, tree, k=k)
    reference = Reference(model, V, k, tree.rank_paths[1:])
    prompt = [rng.randrange(3, V) for _ in range(rng.randrange(1, 12))]
    check_turn(reference, target, drafter, prompt, 30)


def test_the_published_tree_equals_the_reference_cold():
    model = toy_model("llama-grouped", seed=3)
    tree = build_template("2.2.2")
    reference = Reference(model, V, 8, tree.rank_paths[1:])
    out = check_turn(reference, Target(model), TokenRecycling(V, tree), [7, 8, 9], 40)
    assert max(out.accept_lengths) >= 3, "a case in which nothing is accepted proves nothing"


@pytest.mark.parametrize("seed", range(4))
def test_hot_start_carries_the_matrix_over_several_prompts(seed, form):
    """Prompts end by the limit in the middle of a step, or by EOS; after each, both matrices are the same."""
    rng = random.Random(seed)
    model = toy_model("llama", seed=seed)
    tree = random_tree(14, rng, 3)
    eos = (rng.randrange(V),)
    target, drafter = Target(model), TokenRecycling(V, tree, k=3, eos=eos)
    reference = Reference(model, V, 3, tree.rank_paths[1:])
    for turn in range(4):
        prompt = [rng.randrange(3, V) for _ in range(5)]
        check_turn(reference, target, drafter, prompt, 12 + turn, eos)
        assert drafter.matrix.candidates.tolist() == reference.matrix
    drafter.reset()
    assert not drafter.matrix.candidates.any()


def test_eos_inside_a_draft_and_as_bonus_cut_where_the_reference_stops():
    model = toy_model("llama", seed=1)
    tree = build_template("best", nodes=30, k=4)
    target = Target(model)
    free = generate(target, TokenRecycling(V, tree, k=4), [9, 8, 7], max_new_tokens=40)
    inside = 0
    for eos in sorted(set(free.tokens)):
        reference, drafter = Reference(model, V, 4, tree.rank_paths[1:]), TokenRecycling(V, tree, k=4, eos={eos})
        out = check_turn(reference, target, drafter, [9, 8, 7], 40, (eos,))
        assert out.stop == "eos" and out.tokens.index(eos) == len(out.tokens) - 1
        assert drafter.matrix.candidates.tolist() == reference.matrix
        inside += len(out.steps[-1].rank_path) == out.steps[-1].accepted
    assert inside, "a case in which EOS is an accepted draft token"


def test_the_draft_is_the_breadth_first_look_up_by_hand():
    drafter = TokenRecycling(10, Tree.from_rank_paths([[0], [1], [0, 0], [1, 1]]), k=2)
    candidates = torch.tensor([[t + 1, t + 2] for t in range(8)] + [[0, 0]] * 2)
    drafter.matrix.load_state_dict({"candidates": candidates})
    assert drafter.session().draft(3).tokens.tolist() == [3, 4, 5, 5, 7]


def test_update_writes_every_node_rejected_ones_too_and_the_last_of_equals_wins():
    tree = Tree.from_rank_paths([[0], [1], [0, 0]])
    drafter = TokenRecycling(10, tree, k=2)
    candidates = torch.tensor([(1, 2), (3, 4), (5, 6), (7, 8)])
    draft = Draft(tree, torch.tensor([9, 4, 5, 4]))  # token 4 at nodes 1 and 3
    accepted = torch.tensor([True, False, False, False])
    drafter.session().observe(Verification(draft, candidates[:, 0], accepted, 0, [1], candidates=candidates))
    expected = torch.zeros(10, 2, dtype=torch.long)
    expected[9], expected[5], expected[4] = torch.tensor([1, 2]), torch.tensor([5, 6]), torch.tensor([7, 8])
    assert torch.equal(drafter.matrix.candidates, expected)


def test_prompt_logits_are_recycled_only_on_request():
    model = toy_model("llama")
    prompt = [5, 6, 7, 5]
    plain, asked = TokenRecycling(V, Tree.chain(1), k=2), TokenRecycling(V, Tree.chain(1), k=2, recycle_prompt=True)
    for drafter in (plain, asked):
        generate(Target(model), drafter, prompt, max_new_tokens=1)
    with torch.inference_mode():
        top = model(torch.tensor([prompt])).logits[0].topk(2).indices
    assert torch.equal(asked.matrix.candidates[[6, 7]], top[[1, 2]])
    assert torch.equal(asked.matrix.candidates[5], plain.matrix.candidates[5]), "5 occurs twice: as the root it is last"
    assert torch.equal(asked.matrix.candidates[5], top[3])
    assert not plain.matrix.candidates[[6, 7]].any()


def test_a_tree_beyond_k_is_refused():
    with pytest.raises(UserError, match="rank 7, but k=4"):
        TokenRecycling(V, build_template("2.2.2"), k=4)
