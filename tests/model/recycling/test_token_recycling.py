"""Token Recycling: the prompt's logits, and each rule of update as a plain loop."""

import itertools
import random

import pytest
import torch

from model.engine import Draft, Target, Tree, generate, verify
from model.recycling import TokenRecycling
from tests.conftest import toy_model
from tests.model.engine.test_tree import random_tree

V = 61


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
