"""Token Recycling against a slow reference, step by step, cold and hot; rules of update."""

import itertools
import random

import pytest
import torch

from model.engine import Draft, Target, Tree, generate, verify
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


@pytest.mark.parametrize("seed", range(4))
def test_steps_and_matrices_equal_the_reference_on_random_models_and_trees(seed, form):
    """Prompts end by the limit in the middle of a step, or by EOS; the matrix is kept from one to the next."""
    rng = random.Random(seed)
    model = toy_model(("llama", "llama-grouped", "gpt2", "gpt-neox")[seed], seed=seed)
    k = rng.choice([1, 2, 4, 8])
    eos = (rng.randrange(V),)
    tree = random_tree(rng.randrange(1, 20), rng, k) if k > 1 else Tree.chain(rng.randrange(1, 6))
    target = Target(model)
    drafter = TokenRecycling(V, tree, k=k, eos=eos)
    reference = Reference(model, V, k, tree.rank_paths[1:])
    for turn in range(3):
        prompt = [rng.randrange(3, V) for _ in range(rng.randrange(1, 12))]
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
        reference = Reference(model, V, 4, tree.rank_paths[1:])
        drafter = TokenRecycling(V, tree, k=4, eos={eos})
        out = check_turn(reference, target, drafter, [9, 8, 7], 40, (eos,))
        assert out.stop == "eos" and out.tokens.index(eos) == len(out.tokens) - 1
        assert drafter.matrix.candidates.tolist() == reference.matrix
        inside += len(out.steps[-1].rank_path) == out.steps[-1].accepted
    assert inside, "a case in which EOS is an accepted draft token"


def test_prompt_logits_are_recycled_only_on_request():
    model = toy_model("llama")
    prompt = [5, 6, 7, 5]
    plain, recycling = (
        TokenRecycling(V, Tree.chain(1), k=2),
        TokenRecycling(V, Tree.chain(1), k=2, recycle_prompt=True),
    )
    for drafter in (plain, recycling):
        generate(Target(model), drafter, prompt, max_new_tokens=1)
    with torch.inference_mode():
        top = model(torch.tensor([prompt])).logits[0].topk(2).indices
    assert torch.equal(recycling.matrix.candidates[[6, 7]], top[[1, 2]])
    same = torch.equal(recycling.matrix.candidates[5], plain.matrix.candidates[5])
    assert same, "5 occurs twice: as the root it is last"
    assert torch.equal(recycling.matrix.candidates[5], top[3])
    assert not plain.matrix.candidates[[6, 7]].any()


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


def plain_loop(before, draft, logits, update):
    """The matrix after a step, node by node in breadth-first order."""
    after = before.clone()
    chains, picked = draft.tree.chain_of, logits.argmax(-1).tolist()
    accepted = [
        all(draft.tokens[b] == picked[a] for a, b in itertools.pairwise(chain)) for chain in chains
    ]
    path = max(
        (chain for chain, is_accepted in zip(chains, accepted, strict=True) if is_accepted), key=len
    )
    written = {"all": range(len(draft.tree)), "path": path, "root": [0], "frozen": []}[update]
    for node in sorted(written):
        after[draft.tokens[node]] = logits[node].topk(before.shape[1]).indices
    return after


@pytest.mark.parametrize("update", ["all", "path", "root", "frozen"])
@pytest.mark.parametrize("seed", range(4))
def test_each_rule_is_a_plain_loop(update, seed, form):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tree = random_tree(rng.randint(2, 14), rng, 4)
    drafter = TokenRecycling(9, tree, k=4, update=update)  # nine tokens: many nodes share one
    drafter.matrix.candidates.copy_(torch.stack([torch.randperm(9)[:4] for _ in range(9)]))
    for _ in range(6):
        draft = drafter.session().draft(rng.randrange(9))
        draft = Draft(draft.tree, draft.tokens.clone())
        logits = torch.randn(len(tree), 9)
        for node in range(1, len(tree)):  # make some nodes stand
            if rng.random() < 0.5:
                logits[tree.parents[node], draft.tokens[node]] = 9.0 + rng.random()
        # what continues the same text has the same logits
        for node in range(len(tree)):
            for other in range(node):
                if (
                    draft.tokens[tree.chain_of[node]].tolist()
                    == draft.tokens[tree.chain_of[other]].tolist()
                ):
                    logits[node] = logits[other]
        expected = plain_loop(drafter.matrix.candidates, draft, logits, update)
        if drafter.needs.candidates:
            best = logits.topk(drafter.needs.candidates).indices
            drafter.learn(draft.tokens, best, verify(draft, logits.argmax(-1)).accepted)
        assert (drafter.needs.candidates == 0) == (update == "frozen")
        assert torch.equal(drafter.matrix.candidates, expected)
