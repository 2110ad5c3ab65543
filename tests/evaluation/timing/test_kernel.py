"""The kernels' section times what it says: on a CPU the torch twin, whose numbers are SDPA's."""

import pytest
import torch

from evaluation.timing.kernel import Case, measure_case

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", [Case(4, 2, 16, 1, 20), Case(4, 2, 16, 81, 20), Case(4, 4, 16, 8, 50)])
def test_a_row_on_the_cpu(case):
    row = measure_case(case, torch.float32, CPU, repeats=2)
    assert row["tree_us"] > 0 and row["sdpa_us"] > 0 and row["gb_per_s"] > 0 and row["notes"] == {}
    assert row["backend"] == "torch" and row["sdpa_error"] < 1e-5 and row["tree_error"] < 1e-5


def test_bytes_by_hand():
    assert Case(8, 2, 16, 4, 60).nbytes(2) == 2 * (2 * 64 + 8 * 4) * 16 * 2
    assert Case(8, 2, 16, 4, 60).capacity == 64 and Case(8, 2, 16, 4, 61).capacity == 128
