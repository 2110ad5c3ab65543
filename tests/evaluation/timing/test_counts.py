"""What a step asks of the device, counted; and the kernels' section, by hand."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from evaluation.loading.shapes import random_weights
from evaluation.timing import kernel
from evaluation.timing.checks import load_target
from evaluation.timing.floor import Rates, step_cost
from evaluation.timing.kernel import compare_kernels
from evaluation.timing.plan import Budget
from evaluation.timing.report import Report
from evaluation.timing.stepper import Burst, CountedOperators, Stepper, cuda_calls, operator_calls
from evaluation.timing.steps import cell, floor

CUDA = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtypes=(torch.float32,))


def test_operators_are_counted_by_hand():
    with CountedOperators() as counted, torch.inference_mode():
        a = torch.ones(3)
        b = a + 1
        a.copy_(b)
        assert b.sum().item() == 6
    found = operator_calls(counted.counts)
    assert found["copies"] == 1 and found["host_reads"] == 1 and found["operators"] == counted.counts.total() >= 5


def test_runtime_calls_by_hand():
    """Five steps of two graphs and a kernel each; three waits are the timing's own."""
    calls = {"cudaGraphLaunch": 10, "cudaLaunchKernel": 5, "cudaMemcpyAsync": 5, "cudaStreamSynchronize": 8}
    assert cuda_calls(calls) == {"launches": 3.0, "graphs": 2.0, "copies": 1.0, "waits": 1.0}
    assert cuda_calls({}) == dict.fromkeys(("launches", "graphs", "copies", "waits"), 0.0)
    assert operator_calls(Counter({"aten::add": 2}))["host_reads"] == 0


@pytest.mark.parametrize("way", ["eager", "static"])
def test_a_burst_stays_behind_its_context(way):
    model = random_weights("tiny", torch.device("cpu"), torch.float32)
    with Stepper.opened(way, load_target(model, way, 400), (0, 4)) as stepper:
        stepper.go_to([5, 6, 7, 8])
        bursts = [stepper.burst(n) for n in (None, 0, 4, 4)]
        assert 3 + 5 <= stepper.cache.length <= 3 + 5 * 5, "three tokens, and five steps behind them"
        calls = stepper.calls(4)
    assert all(burst.seconds > 0 for burst in bursts) and bursts[-1].setup_s == 0 and calls["operators"] > 20


def test_cells_and_floors_by_hand():
    bursts = {None: [Burst(3.0, 0), Burst(1.0, 0), Burst(2.0, 0)], 0: [Burst(4.0, 9.0)] * 3}
    assert cell(bursts, 3) == {"rounds": 3, "plain_s": 2.0, "step_s": {"0": 4.0}}
    target = load_target(random_weights("tiny", torch.device("cpu"), torch.float32), "eager", 100)
    found = floor(target, 10, bursts, Rates(1e6, 1.0))
    assert found["plain_bytes"] == step_cost(target, 1, 10).bytes
    assert found["floor_share"] == pytest.approx(found["plain_bytes"] / 1e6 / 2.0)


def test_kernels_are_compared_and_one_that_fails_is_a_row(monkeypatch, tmp_path):
    monkeypatch.setattr("evaluation.timing.kernel.triton_problem", lambda device: "")

    def measure_case(case, dtype, device):
        if case.kv_heads == 8:
            raise RuntimeError("no registers")
        return {**vars(case), "tree_us": 1.0, "sdpa_us": 2.0, "flex_us": None, "notes": {}, "gb_per_s": 3.0}

    monkeypatch.setattr(kernel, "measure_case", measure_case)
    report = Report(tmp_path, Budget(8), 2.7)
    found = compare_kernels(CUDA, report)
    assert [row.get("error") for row in found["rows"]] == [None] * 4 + ["RuntimeError: no registers"] * 4
    html = report.html.read_text()
    assert "32/32/128" in html and html.count("no registers") == 8, "among the failures, and in the table"
