"""Attention that reads the cache in parts: sdpa's numbers, for every shape that graphs have."""

import math
import threading

import pytest
import torch
from transformers import AttentionInterface

from model.engine import Target, generate, kernels
from model.engine.kernels import SETTING, CompiledKernels, SplitAttention, blocked, merged, parts_of
from model.recycling import TokenRecycling, build_template
from tests.conftest import greedy, toy_model
from tests.model.engine.fake_graphs import FakeGraphs

LOG2_E = 1 / math.log(2)


def attend(query, key, value, mask, scaling):
    """What CUDA's kernel computes: exponentials to base 2, and 0 for rows that see nothing (log_sums are padded)."""
    exponents = (query @ key.transpose(2, 3) * (scaling or query.shape[3] ** -0.5) + mask) * LOG2_E
    most = exponents.amax(3, keepdim=True)
    most = most.masked_fill(most == -math.inf, 0)
    exponentials = torch.exp2(exponents - most)
    sums = exponentials.sum(3, keepdim=True)
    sums = sums.masked_fill(sums == 0, 1)
    log_sums = (most / LOG2_E + sums.log())[..., 0]
    return exponentials / sums @ value, torch.nn.functional.pad(log_sums, (0, -query.shape[2] % 32), value=math.inf)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """A GPU of 132 multiprocessors; the numbers of parts that were attended to."""
    calls = []
    monkeypatch.setattr(kernels, "_processors", lambda device: 132)
    monkeypatch.setattr(kernels, "_attend", lambda *args: calls.append(len(args[1])) or attend(*args))
    return calls


def test_numbers_of_parts():
    """A power of two: as many as the device has room for, of 128 columns or more and multiples of 8."""
    assert [parts_of(32, columns, 264) for columns in (128, 255, 256, 512, 1024, 4096)] == [1, 1, 2, 4, 8, 8]
    assert [parts_of(blocks, 4096, 264) for blocks in (3, 64, 132, 133)] == [32, 4, 2, 1]
    assert [parts_of(8, columns, 264) for columns in (1000, 1008, 1024)] == [1, 2, 8]


@pytest.mark.parametrize(("heads", "shared", "width"), [(4, 4, 16), (6, 2, 8), (4, 1, 8)])
@pytest.mark.parametrize("n", [1, 5, 81])
@pytest.mark.parametrize(("seen", "columns"), [(30, 256), (500, 768), (1023, 1024)])
def test_results_are_sdpas(heads, shared, width, n, seen, columns, calls):
    """Columns that a row sees lie in any part, and some parts have none."""
    torch.manual_seed(seen)
    module, sdpa, split = torch.nn.Module(), AttentionInterface()["sdpa"], SplitAttention(merged)
    module.num_key_value_groups = heads // shared
    query = torch.randn(1, n, heads, width).transpose(1, 2)
    key, value = (torch.randn(1, shared, columns + 40, width)[:, :, :columns] for _ in range(2))
    mask = torch.full((1, 1, n, columns), blocked(torch.float32))
    mask[..., :seen].masked_fill_(torch.rand(n, seen) < 0.5, 0)
    mask[..., seen - 1] = 0
    given = module, query, key, value, mask
    expected = sdpa(*given, scaling=0.3)[0]
    with kernels._swapping:
        output = split(*given, scaling=0.3)[0]
    assert len(calls) == 1 and calls[0] > 1
    assert output.is_contiguous() and torch.allclose(output, expected, atol=1e-6)


def test_what_it_is_not_made_for_goes_to_sdpa(calls):
    """And what other threads forward."""
    split, seen = SplitAttention(merged), []
    split._sdpa = lambda *args, **kwargs: seen.append(kwargs) or (args[1], None)
    query, key, mask = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 256, 8), torch.zeros(1, 1, 3, 256)
    odd = torch.randn(1, 4, 3, 6), *2 * (torch.randn(1, 2, 256, 6),)
    with kernels._swapping:
        split(torch.nn.Module(), query, key, key, None)
        split(torch.nn.Module(), query, key, key, mask, softcap=30.0)
        split(torch.nn.Module(), query, key, key, mask.expand(-1, 4, -1, -1))
        split(torch.nn.Module(), *odd, mask)
        split(torch.nn.Module(), query, key, key[..., :6], mask)
        split(torch.nn.Module(), query, key, key, mask, dropout=0.1)
        assert len(seen) == 6 and not calls
        split(torch.nn.Module(), query, key, key, mask)
        assert len(seen) == 6 and calls == [2]
        other = threading.Thread(target=split, args=(torch.nn.Module(), query, key, key, mask))
        other.start()
        other.join()
    assert len(seen) == 7


@pytest.mark.parametrize("kind", ["llama", "llama-grouped", "gpt2", "mistral"])
def test_captured_steps_attend_in_parts_and_decode_the_same_text(kind, calls, monkeypatch):
    model, graphs = toy_model(kind), FakeGraphs(monkeypatch)
    target = graphs.target(model)
    monkeypatch.setattr(torch, "compile", lambda own, **how: own)
    target.kernels = CompiledKernels(model)
    assert target.kernels.names[-1] == "attention in parts"
    drafter, prompt = TokenRecycling(61, build_template("best", nodes=9)), [5, 6, 7] * 30
    out = generate(target, drafter, prompt, max_new_tokens=40, execution="graph")
    assert out.tokens == greedy(model, prompt, 40) and set(calls) == {2}
    assert vars(model.config)[SETTING] == "sdpa"


def test_another_model_of_the_config_is_not_refused_meanwhile():
    model = toy_model("llama")
    other = type(model)(model.config).eval()
    target = Target(other)
    with CompiledKernels(model, lambda graph, inputs, options: graph.forward):
        assert vars(model.config)[SETTING] == "sdpa_split" and not target.changed
        Target(type(model)(model.config).eval())
