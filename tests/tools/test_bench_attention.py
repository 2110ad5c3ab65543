"""The attention benchmark runs where there is no GPU, and says what it measured."""

import json

import pytest
import torch

from model.decoding.attention import H200, Plan
from tools.bench_attention import Case, main, plans


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it takes minutes: run it by hand")
def test_it_prints_a_table_and_ends_in_json(capsys):
    main(["--heads", "4/2/16", "--nodes", "1", "81", "--lengths", "20", "--repeats", "2"])
    *table, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert "test of this script" in table[0] and len(table) == 2 + len(report["rows"]) == 4
    for row in report["rows"]:
        assert row["tree_us"] > 0 and row["sdpa_us"] > 0 and row["gb_per_s"] > 0
        assert row["backend"] == "torch" and row["sdpa_error"] < 1e-5


def test_bytes_and_plans_by_hand():
    assert Case(8, 2, 16, 4, 60).nbytes(2) == 2 * (2 * 64 + 8 * 4) * 16 * 2
    assert Case(8, 2, 16, 4, 60).capacity == 64 and Case(8, 2, 16, 4, 61).capacity == 128
    for plan in plans(Plan.choose(96, 8, 128, 2048, 2, H200)):
        assert 16 <= plan.block_m <= 128 and plan.block_n in (16, 32, 64) and 1 <= plan.splits <= 64
