"""The matrix: size, order of writes, saving and loading."""

import random

import pytest
import torch

from model.errors import UserError
from model.files import load_state, save_state
from model.recycling.matrix import AdjacencyMatrix


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.int64, 8), (torch.int32, 4)])
def test_bytes_are_measured(dtype, itemsize):
    assert AdjacencyMatrix(32000, 8, dtype=dtype).nbytes == 32000 * 8 * itemsize
    assert AdjacencyMatrix(32000, 8).nbytes / 2**20 < 2


@pytest.mark.parametrize("seed", range(10))
def test_update_is_a_plain_loop_over_the_nodes(seed, form):
    rng = random.Random(seed)
    matrix, rows = AdjacencyMatrix(9, 3), [[0] * 3 for _ in range(9)]
    for _ in range(5):
        tokens = [rng.randrange(9) for _ in range(20)]
        top = [[rng.randrange(9) for _ in range(3)] for _ in range(20)]
        matrix.update(torch.tensor(tokens), torch.tensor(top))
        for token, row in zip(tokens, top, strict=True):
            rows[token] = row
    assert matrix.candidates.tolist() == rows
    tokens, ranks = torch.tensor([3, 3, 8]), torch.tensor([0, 2, 1])
    assert matrix.look_up(tokens, ranks).tolist() == [rows[3][0], rows[3][2], rows[8][1]]


@pytest.mark.parametrize("k", [0, -1, 10])
def test_impossible_k_is_refused(k):
    with pytest.raises(UserError, match=f"k={k}"):
        AdjacencyMatrix(9, k)


def test_saved_and_loaded_is_the_same(tmp_path):
    matrix = AdjacencyMatrix(9, 3, dtype=torch.int32)
    matrix.update(torch.tensor([4, 5]), torch.tensor([[1, 2, 3], [4, 5, 6]]))
    save_state({"candidates": matrix.candidates}, tmp_path / "m.safetensors")
    other = AdjacencyMatrix(9, 3)
    other.load_state_dict(load_state(tmp_path / "m.safetensors"))
    assert torch.equal(other.candidates, matrix.candidates.long())
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_matrix_that_does_not_fit_or_is_no_matrix_is_refused(tmp_path):
    matrix = AdjacencyMatrix(9, 3)
    with pytest.raises(UserError, match=r"\[8, 3\].*\[9, 3\]"):
        matrix.load_state_dict({"candidates": torch.zeros(8, 3, dtype=torch.long)})
    with pytest.raises(UserError, match="outside the vocabulary"):
        matrix.load_state_dict({"candidates": torch.full((9, 3), 9)})
    with pytest.raises(UserError, match="no saved state"):
        load_state(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(UserError, match="bad.safetensors is not a saved state"):
        load_state(tmp_path / "bad.safetensors")
