"""Whose candidates are written back: each rule against a plain loop, and the same in static steps."""

import itertools
import random

import pytest
import torch

from model.engine import Draft, Target, Tree, generate
from model.engine.verification import verify
from model.errors import UserError
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model
from tests.model.engine.test_tree import random_tree


def plain_loop(before, draft, logits, update):
    """The matrix after a step, node by node in breadth-first order."""
    after = before.clone()
    chains, picked = draft.tree.chain_of, logits.argmax(-1).tolist()
    accepted = [all(draft.tokens[b] == picked[a] for a, b in itertools.pairwise(chain)) for chain in chains]
    path = max((chain for chain, is_accepted in zip(chains, accepted, strict=True) if is_accepted), key=len)
    written = {"all": range(len(draft.tree)), "path": path, "root": [0], "frozen": []}[update]
    for node in sorted(written):
        after[draft.tokens[node]] = logits[node].topk(before.shape[1]).indices
    return after


@pytest.mark.parametrize("update", ["all", "path", "root", "frozen"])
@pytest.mark.parametrize("seed", range(12))
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
                same = [int(draft.tokens[i]) for i in tree.chain_of[node]] == [
                    int(draft.tokens[i]) for i in tree.chain_of[other]
                ]
                if same:
                    logits[node] = logits[other]
        expected = plain_loop(drafter.matrix.candidates, draft, logits, update)
        if drafter.needs.candidates:
            best = logits.topk(drafter.needs.candidates).indices
            drafter.learn(draft.tokens, best, verify(draft, logits.argmax(-1)).accepted)
        assert (drafter.needs.candidates == 0) == (update == "frozen")
        assert torch.equal(drafter.matrix.candidates, expected)


@pytest.mark.parametrize("update", ["all", "path", "root", "frozen"])
def test_no_rule_changes_the_output_and_static_steps_agree(update):
    model = toy_model("llama")
    prompt = [1, *range(5, 30)]
    tree = build_template("best", nodes=24)
    outcomes = []
    for execution in ("eager", "static"):
        target = Target(model)
        drafter = TokenRecycling(61, tree, update=update)
        runs = [generate(target, drafter, prompt, max_new_tokens=40, execution=execution) for _ in range(2)]
        outcomes.append([(run.tokens, run.accept_lengths) for run in runs])
    assert outcomes[0] == outcomes[1]
    plain = generate(Target(model), TokenRecycling(61, Tree.chain(0)), prompt, max_new_tokens=40)
    assert all(tokens == plain.tokens for tokens, _ in outcomes[0])
    if update == "frozen":
        assert not drafter.matrix.candidates.any(), "it stays as it was"


def test_unknown_or_contradicting_rules_are_refused():
    tree = build_template("chain", depth=2)
    with pytest.raises(UserError, match="update=some"):
        TokenRecycling(61, tree, update="some")
    with pytest.raises(UserError, match="contradict"):
        TokenRecycling(61, tree, update="frozen", recycle_prompt=True)
