"""Spine: a topology by hand, drafts against a slow reference."""

import random

import pytest
import torch

from model.methods.spine import Spine, SpineSession, spine_tree
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


def slow_draft(session: SpineSession, root: int) -> list[int]:
    """The draft's tokens, node by node in plain Python; of several places of a match the one that the text takes."""
    drafter = session.drafter
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
            others = [
                t
                for i, t in enumerate(row)
                if i != (row.index(copied[depth]) if copied[depth] in row else -1)
            ]
            tokens.append(others[path[-1] - 1])
        else:
            tokens.append(row[path[-1]])
    return tokens


ACCEPT_PROBS = (0.0, 0.4, 0.6, 0.8)


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize(
    ("seed", "dtype"), [(0, "int64"), (1, "int32"), (2, "int64"), (3, "int64")]
)
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
        drafter.load_state_dict({"candidates": torch.tensor(rows, dtype=getattr(torch, dtype))})
        prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 30))]
        session = drafter.session()
        session.begin(prompt + prompt[-rng.randrange(1, 5) :])
        root = session.text.tokens[-1]
        draft = session.draft(root)
        assert draft.tokens.tolist() == slow_draft(session, root)
        matches.add(session.text.length)
    assert len(matches) > 2
