"""The kernel for draft trees against attention in float64, on a GPU or in Triton's interpreter."""

import importlib.util
import os
import random

import numpy as np
import pytest
import torch

from model.engine.attention.sight import Sight, fill_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1")
    or importlib.util.find_spec("triton") is None,
    reason="runs in Triton's interpreter: bash test.sh --kernels",
)
ERRORS = {torch.float32: 2e-6, torch.float16: 4e-3}  # of the norm
if DEVICE == "cuda":  # Triton's interpreter multiplies bfloat16's bits as whole numbers
    ERRORS[torch.bfloat16] = 3e-2


def random_ancestors(nodes, rng):
    """bool (nodes, nodes) of a random tree."""
    seen = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        seen[node] |= seen[rng.randrange(node)]
    return seen


def expected(query, key, value, ancestors, stretches, scaling):
    """float64 (n, H, Dv), a row after the other."""
    rows = []
    group = query.shape[1] // key.shape[1]
    for seen, (base, length) in zip(ancestors, stretches, strict=True):
        for node in range(len(seen)):
            columns = [
                *range(base, base + length),
                *(base + length + np.flatnonzero(seen[node])).tolist(),
            ]
            keys, values = (
                part[0][:, columns].double().repeat_interleave(group, 0) for part in (key, value)
            )
            scores = torch.einsum("hd,hcd->hc", query[0, :, len(rows)].double(), keys) * scaling
            rows.append(torch.einsum("hc,hcd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


CASES = [  # nodes and committed columns of each sequence; heads, heads that are shared, width, width of values
    ([(1, 37)], 4, 4, 64, 64),
    ([(25, 100)], 4, 2, 64, 64),
    ([(81, 300)], 6, 2, 80, 80),
    ([(130, 0)], 2, 1, 96, 96),
    ([(5, 3000)], 8, 1, 128, 128),
    ([(17, 64)], 1, 1, 256, 256),
    ([(9, 50)], 4, 4, 96, 64),
    ([(5, 40), (1, 200), (33, 0)], 6, 2, 64, 64),
    ([(1, 1), (1, 7), (1, 130), (1, 64), (1, 0)], 32, 8, 64, 64),
    ([(24, 700), (81, 12), (3, 90), (50, 333)], 4, 2, 128, 128),
]


@pytest.fixture(autouse=True)
def defined_shifts(monkeypatch):
    """The interpreter refuses shifts that a GPU leaves undefined."""
    if DEVICE == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder

    shift = InterpreterBuilder.create_ashr

    def checked(builder, number, bits):
        assert (bits.data >= 0).all() and (bits.data < 64).all()
        return shift(builder, number, bits)

    monkeypatch.setattr(InterpreterBuilder, "create_ashr", checked)


@pytest.mark.parametrize(
    "itemsize, width, rows", [(2, 128, 64), (2, 256, 32), (4, 64, 32), (4, 256, 16)]
)
def test_large_numbers_have_smaller_tiles(itemsize, width, rows):
    """64 rows of float32 spilled up to 28 KB a thread."""
    from model.engine.attention.tree_kernel import tile_of

    heights = [tile_of(n, width, itemsize)["ROWS"] for n in (1, 17, 648)]
    assert heights == [16, min(32, rows), rows]


@pytest.mark.parametrize("parts", [0, 1, 8])
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("dtype", ERRORS)
def test_the_kernel_attends_as_the_table_says(case, dtype, parts):
    """Everything outside the sequences' own columns is NaN, and one sequence of the table has no rows."""
    from model.engine.attention.tree_kernel import attend

    sequences, heads, shared, width, values = CASES[case]
    rng = random.Random(case)
    torch.manual_seed(case)
    ancestors = [random_ancestors(nodes, rng) for nodes, _ in sequences]
    room = max(nodes + length for nodes, length in sequences) + 40
    places = rng.sample(range(len(sequences) + 1), len(sequences))
    stretches = [
        (place * room, length) for place, (_, length) in zip(places, sequences, strict=True)
    ]
    n = sum(nodes for nodes, _ in sequences)
    columns = room * (len(sequences) + 1)
    query = torch.randn(1, n, heads, width).to(dtype).transpose(1, 2)
    key = torch.full((1, shared, columns, width), float("nan"), dtype=dtype)
    value = torch.full((1, shared, columns, values), float("nan"), dtype=dtype)
    for (nodes, length), (base, _) in zip(sequences, stretches, strict=True):
        for part in (key, value):
            own = part[:, :, base : base + length + nodes]
            own.copy_(torch.randn(own.shape))
    table = np.zeros((n, Sight.width(n)), dtype=np.int64)
    fill_table(table, ancestors, stretches)
    count = min(len(sequences) + 1, n)
    given = (tensor.to(DEVICE) for tensor in (query, key, value, torch.from_numpy(table)))
    output = attend(*given, count, width**-0.5, parts).cpu()
    reference = expected(query, key, value, ancestors, stretches, width**-0.5)
    error = float((output[0].double() - reference).norm() / reference.norm())
    assert output.dtype == dtype and error < ERRORS[dtype]
