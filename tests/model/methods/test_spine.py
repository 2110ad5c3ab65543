"""Spine: topologies by hand and by their law, drafts against a slow reference, losslessness, state, refusals."""

import itertools
import math
import random

import pytest
import torch

from model.engine import Draft, Target, Verification, generate, verify
from model.errors import UserError
from model.methods.spine import Spine, SpineSession, spine_tree
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model
from tests.model.methods.test_suffix import longest_repeat

V = 61


def test_a_small_topology_by_hand():
    # After the root the copied token is accepted with 0.8, the best other one with 0.2 * 0.45 = 0.09; below it 0.5, so:
    # spine 0.8, 0.4, 0.2, 0.1; beside them 0.09, 0.8 * 0.5 * 0.45 = 0.18, 0.4 * 0.5 * 0.45 = 0.09
    tree, spine = spine_tree(1, 4, 8, [0.8, 0.5])
    assert spine == 3 and tree.rank_paths == [(), (0,), (0, 0), (0, 1), (0, 0, 0)]
    # Chosen: 0.8 * 0.45 = 0.36 beside the copied 0.2; below the former 0.162 and 0.073; the next other one 0.096; and
    # below the copied one, where the spine ends, 0.2 * 0.8 * 0.45 = 0.072: its best candidate, for none is taken
    tree, spine = spine_tree(1, 6, 8, [0.2])
    assert spine == 1 and tree.rank_paths == [(), (0,), (1,), (2,), (0, 0), (1, 0), (1, 0, 0)]


def test_without_a_match_it_is_the_published_orders_cut():
    best = build_template("best", nodes=24).rank_paths
    for match, accept_probs in ((0, [0.5]), (1, [0.0, 0.5]), (3, [0.5, 0.0])):
        tree, spine = spine_tree(match, 24, 8, accept_probs)
        assert (tree.rank_paths, spine) == (best, 0)


def test_sure_copies_make_a_chain_and_longer_matches_a_longer_spine():
    tree, spine = spine_tree(1, 9, 8, [1.0])
    assert tree.is_chain and spine == 9
    spines = [spine_tree(match, 24, 8, [0.2, 0.45, 0.55, 0.65, 0.75, 0.85])[1] for match in range(1, 8)]
    assert spines == sorted(spines) and spines[0] < spines[-1]


@pytest.mark.parametrize(("nodes", "k"), [(1, 8), (2, 1), (5, 2), (16, 8), (24, 4), (80, 8), (200, 32)])
def test_every_topology_has_the_budget_and_fits_k(nodes, k):
    for match, accept_probs in itertools.product(range(4), ([0.3, 0.6, 0.9], [1.0], [0.05])):
        tree, spine = spine_tree(match, nodes, k, accept_probs)
        assert len(tree) == nodes + 1 and tree.max_rank < k
        assert all((0,) * depth in tree.rank_paths for depth in range(spine + 1))


@pytest.mark.parametrize("match", [1, 2, 5])
def test_no_node_outside_is_likelier_than_one_inside(match):
    """The greedy choice, checked by listing all nodes of depth 3 and less with the law written out."""
    accept_probs = [0.3, 0.5, 0.7]
    tree, spine = spine_tree(match, 12, 4, accept_probs)
    right = [accept_probs[min(match + depth, 3) - 1] for depth in range(4)]

    def recycled(ranks):
        return math.prod(0.45 / (rank + 1) ** 1.9 for rank in ranks)

    def likelihood_of(path):  # ranks as while choosing: 0 is the copied token, r + 1 another candidate
        depth = next((i for i, rank in enumerate(path) if rank), len(path))
        if depth == len(path):
            return math.prod(right[:depth])
        return math.prod(right[:depth]) * (1 - right[depth]) * recycled((path[depth] - 1, *path[depth + 1 :]))

    tip = (0,) * spine
    inside = {
        (*tip, path[spine] + 1, *path[spine + 1 :]) if len(path) > spine and path[:spine] == tip else path
        for path in tree.rank_paths[1:]
    }
    everyone = {path for d in (1, 2, 3) for path in itertools.product(range(4), repeat=d)}
    outside = max(likelihood_of(path) for path in everyone - inside)
    assert min(likelihood_of(path) for path in inside) >= outside - 1e-6


def slow_draft(session: SpineSession, root: int) -> list[int]:
    """The draft's tokens, node by node in plain Python; of several places of a match the one that the text takes."""
    drafter = session.method
    text, end, rows = session.text.tokens, session.text.end, drafter.matrix.candidates.tolist()
    match = longest_repeat(text)
    assert match == 0 or (end < len(text) and text[end - match : end] == text[-match:])
    tree, spine = spine_tree(match, len(drafter.tree) - 1, drafter.matrix.k, ACCEPT_PROBS)
    copied = [text[end]] if match else []
    while match and len(copied) < spine:
        copied.append((text + copied)[end + len(copied)])
    tokens = [root]
    for node in range(1, len(tree)):
        path, parent = tree.rank_paths[node], int(tree.parents[node])
        row, depth = rows[tokens[parent]], len(path) - 1
        if path == (0,) * len(path) and len(path) <= spine:
            tokens.append(copied[depth])
        elif path[:-1] == (0,) * depth and depth < spine:
            others = [t for i, t in enumerate(row) if i != (row.index(copied[depth]) if copied[depth] in row else -1)]
            tokens.append(others[path[-1] - 1])
        else:
            tokens.append(row[path[-1]])
    return tokens


ACCEPT_PROBS = (0.0, 0.4, 0.6, 0.8)


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("seed", range(20))
def test_drafts_equal_the_slow_reference(seed, dtype, numpy, monkeypatch):
    if not numpy:  # as off the CPU
        for module in ("model.recycling.matrix", "model.engine.devices"):
            monkeypatch.setattr(f"{module}.as_array", lambda tensor: None)
    rng = random.Random(seed)
    vocab, k = rng.randrange(5, 9), rng.randrange(1, 5)
    drafter = Spine(vocab, nodes=rng.randrange(1, 30), accept_probs=ACCEPT_PROBS, k=k, dtype=dtype)
    matches = set()
    for _ in range(12):
        rows = [rng.sample(range(vocab), k) if rng.randrange(5) else [0] * k for _ in range(vocab)]
        drafter.load_state_dict({"candidates": torch.tensor(rows, dtype=dtype)})
        prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 30))]
        session = drafter.session()
        session.begin(prompt + prompt[-rng.randrange(1, 5) :])
        root = session.text.tokens[-1]
        draft = session.draft(root)
        assert draft.tokens.tolist() == slow_draft(session, root)
        matches.add(session.text.length)
    assert len(matches) > 2


def test_a_spine_token_is_not_drafted_twice():
    """Whatever its rank in the matrix, its siblings are the other candidates, best first."""
    drafter = Spine(9, nodes=6, accept_probs=[0.5], k=4)
    for row, others in (([3, 4, 5, 6], [4, 5]), ([4, 3, 5, 6], [4, 5]), ([4, 5, 6, 7], [4, 5]), ([5, 6, 4, 3], [5, 6])):
        drafter.load_state_dict({"candidates": torch.tensor([row] * 9)})
        session = drafter.session()
        session.begin([2, 3, 8, 2])
        draft = session.draft(2)
        children = [i for i in range(1, 7) if int(draft.tree.parents[i]) == 0]
        assert draft.tokens[children].tolist() == [3, *others][: len(children)] and len(children) > 1


def test_of_duplicate_siblings_the_deeper_one_wins():
    """A row that was never written drafts one token several times; whichever has more below it is kept."""
    drafter = Spine(9, nodes=8, accept_probs=[0.5], k=3)
    session = drafter.session()
    session.begin([1, 2])
    draft = session.draft(2)  # no match, matrix zero: all nodes are token 0
    assert draft.tokens.tolist() == [2] + [0] * 8
    logits = torch.zeros(9, 9)
    logits[:, 0] = 1.0
    outcome = verify(draft, logits.argmax(-1))
    assert outcome.tokens == [0] * (draft.tree.max_depth + 1)


def test_without_matches_it_is_token_recycling():
    target = Target(toy_model("llama", seed=4))
    spine, plain = Spine(V, nodes=24, accept_probs=[0.0]), TokenRecycling(V, build_template("best", nodes=24))
    for prompt in ([4, 5, 6], [7, 8]):
        a, b = (generate(target, d, prompt, max_new_tokens=50) for d in (spine, plain))
        assert (a.tokens, a.steps) == (b.tokens, b.steps)
    assert torch.equal(spine.matrix.candidates, plain.matrix.candidates)


def test_every_node_teaches_and_a_saved_state_goes_on_exactly():
    drafter = Spine(10, nodes=2, accept_probs=[0.9], k=2)
    session = drafter.session()
    session.begin([4, 5, 4])
    draft = session.draft(4)
    assert draft.tree.is_chain and draft.tokens.tolist() == [4, 5, 4]
    candidates = torch.tensor([(1, 2), (3, 6), (7, 8)])
    accepted = torch.tensor([True, False, False])
    draft = Draft(draft.tree, draft.tokens)
    session.observe(Verification(draft, candidates[:, 0], accepted, 0, [1], candidates=candidates))
    assert drafter.matrix.candidates[[4, 5]].tolist() == [[7, 8], [3, 6]]  # of token 4's two nodes the last counts
    assert session.text.tokens == [4, 5, 4, 1]

    target, prompt = Target(toy_model("llama", seed=1)), [5, 6, 7]
    one, other = Spine(V), Spine(V)
    generate(target, one, prompt, max_new_tokens=30)
    other.load_state_dict({name: tensor.clone() for name, tensor in one.state_dict().items()})
    a, b = (generate(target, d, [9, 8, 7, 9], max_new_tokens=40) for d in (one, other))
    assert a.steps == b.steps and torch.equal(one.matrix.candidates, other.matrix.candidates)
    one.reset()
    assert not one.matrix.candidates.any()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(nodes=0), "nodes=0"),
        (dict(nodes=5000), "nodes=5000"),
        (dict(nodes="many"), "nodes=many"),
        (dict(accept_probs=[]), "accept_probs="),
        (dict(accept_probs=[0.5, 1.5]), "accept_probs="),
        (dict(accept_probs=["often"]), "accept_probs="),
        (dict(k=0), "k=0"),
    ],
)
def test_bad_settings_are_refused(wrong, says):
    with pytest.raises(UserError, match=says):
        Spine(V, **wrong)
