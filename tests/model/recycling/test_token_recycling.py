"""Token Recycling against a slow reference, step by step, cold and hot; rules of update."""

import random

import pytest
import torch

from model.engine import Target, Tree, generate
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


RULES = ["all", "all", "path", "root", "frozen"]


@pytest.mark.parametrize("seed, update", list(enumerate(RULES)))
def test_steps_and_matrices_equal_the_reference_on_random_models_and_trees(seed, update, form):
    """Prompts end by the limit in the middle of a step, or by EOS; the matrix is kept from one to the next."""
    rng = random.Random(seed)
    model = toy_model(("llama", "gpt2")[seed % 2], seed=seed)
    k = rng.choice([1, 2, 4, 8])
    eos = (rng.randrange(V),)
    tree = random_tree(rng.randrange(1, 20), rng, k) if k > 1 else Tree.chain(rng.randrange(1, 6))
    target = Target(model)
    drafter = TokenRecycling(V, tree, k=k, eos=eos, update=update)
    reference = Reference(model, V, k, tree.rank_paths[1:], update)
    first = torch.randint(3, V, (V, k)) if update == "frozen" else torch.zeros(V, k).long()
    drafter.matrix.candidates.copy_(first)
    reference.matrix = first.tolist()
    for turn in range(3):
        prompt = [rng.randrange(3, V) for _ in range(rng.randrange(1, 12))]
        check_turn(reference, target, drafter, prompt, 12 + turn, eos)
        assert drafter.matrix.candidates.tolist() == reference.matrix
    assert (drafter.needs.candidates == 0) == (update == "frozen")
    drafter.reset()
    assert not drafter.matrix.candidates.any()


def test_eos_inside_a_draft_and_as_bonus_cut_where_the_reference_stops():
    model = toy_model("llama", seed=1)
    tree = build_template("best", nodes=30, k=4)
    target = Target(model)
    free = generate(target, TokenRecycling(V, tree, k=4), [9, 8, 7], max_new_tokens=40)
    inside = 0
    for eos in sorted(set(free.tokens))[::3]:
        reference = Reference(model, V, 4, tree.rank_paths[1:])
        drafter = TokenRecycling(V, tree, k=4, eos={eos})
        out = check_turn(reference, target, drafter, [9, 8, 7], 40, (eos,))
        assert out.stop == "eos" and out.tokens.index(eos) == len(out.tokens) - 1
        assert drafter.matrix.candidates.tolist() == reference.matrix
        inside += len(out.steps[-1].rank_path) == out.steps[-1].accepted
    assert inside, "a case in which EOS is an accepted draft token"


def test_prompt_logits_are_recycled_only_on_request():
    model = toy_model("llama")
    prompt = [5, 6, 7, 5]  # as the root, 5 is last
    matrices = []
    for recycle_prompt in (True, False):
        drafter = TokenRecycling(V, Tree.chain(1), k=2, recycle_prompt=recycle_prompt)
        generate(Target(model), drafter, prompt, max_new_tokens=1)
        matrices.append(drafter.matrix.candidates)
    with torch.inference_mode():
        top = model(torch.tensor([prompt])).logits[0].topk(2).indices
    assert torch.equal(matrices[0][[6, 7, 5]], top[1:])
    assert torch.equal(matrices[1][5], top[3])
    assert not matrices[1][[6, 7]].any()


def test_a_turn_recycles_the_logits_of_its_new_tokens():
    """The cache keeps the first turn, so the prompt is read from a later position on."""
    model = toy_model("llama")
    target = Target(model)
    drafter = TokenRecycling(V, Tree.chain(1), k=2, recycle_prompt=True)
    first = generate(target, drafter, [5, 6, 7], max_new_tokens=3, reuse=True).tokens
    prompt = [5, 6, 7, *first, 50, 51, 52]
    generate(target, drafter, prompt, max_new_tokens=1, reuse=True)
    with torch.inference_mode():
        top = model(torch.tensor([prompt])).logits[0].topk(2).indices
    assert torch.equal(drafter.matrix.candidates[[50, 51]], top[-3:-1])


@pytest.mark.parametrize(
    "update, eos", [("all", ()), ("all", (2, 3)), ("path", (2, 3)), ("root", ())]
)
def test_sequences_of_a_batch_draft_and_learn_at_once_as_in_turns(update, eos, form):
    """Few tokens, so that sequences write the same rows; some of them accept a drafted EOS."""
    torch.manual_seed(0)
    tree = build_template("best", nodes=12, k=4)
    at_once, in_turns = (TokenRecycling(9, tree, k=4, eos=eos, update=update) for _ in range(2))
    for _ in range(5):
        drafts = at_once.grow(torch.randint(9, (6, 1)))
        assert drafts.tolist() == [in_turns.grow(row[:1]).tolist() for row in drafts]
        candidates = torch.randint(9, (6, 13, 4))
        accepted = torch.rand(6, 13) < 0.2
        at_once.learn(drafts, candidates, accepted)
        for learnt in zip(drafts, candidates, accepted, strict=True):
            in_turns.learn(*learnt)
        assert at_once.matrix.candidates.equal(in_turns.matrix.candidates)
