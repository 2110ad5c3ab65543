"""The kernel of the greatest logits against a stable sort. On a GPU where there is one, else in the interpreter."""

import importlib.util
import sys

import pytest
import torch

from model.decoding import Target, generate, kernels, selection
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model
from tests.model.decoding.kernels import SHARED, compile_for

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
KERNEL = "model.decoding.selection_kernel"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def sorted_first(logits, k):
    """The oracle: the k greatest, of equal ones the lower column first."""
    return logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]


def rows_of(vocab, dtype):
    """Noise, ties, and what floats have at their edges."""
    generator = torch.Generator().manual_seed(vocab)
    noise = torch.randn(4, vocab, generator=generator).to(dtype)
    ties = torch.randint(-2, 3, (4, vocab), generator=generator).to(dtype)
    edges = noise.clone()
    edges[0, vocab // 2] = float("nan")
    edges[1], edges[2, vocab // 3 :], edges[2, -1] = float("-inf"), float("-inf"), float("inf")
    edges[3], edges[3, ::2] = 0.0, -0.0
    window = torch.cat((ties, noise), dim=1)[:, vocab:]  # rows that are further apart than they are long
    return [rows.to(DEVICE) for rows in (noise, ties, edges, noise - 100, window)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("vocab", "k"), [(5, 5), (61, 8), (128, 1), (300, 3), (2500, 8), (700, 64)])
def test_the_kernel_is_a_stable_sort(vocab, k, dtype):
    for logits in rows_of(vocab, dtype):
        assert torch.equal(selection._by_kernel(logits, k), sorted_first(logits, k))


def test_rows_of_any_layout():
    logits = torch.randn(50, 6, device=DEVICE).t()  # the last dimension's stride is not one
    assert torch.equal(selection._by_kernel(logits, 4), sorted_first(logits, 4))


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("vocab", [32000, 128256, 151936])
def test_real_vocabularies(vocab):
    logits = torch.randn(81, vocab, device=DEVICE, dtype=torch.bfloat16)
    assert kernels.problem("top-k", DEVICE) == ""
    assert torch.equal(selection.top_k(logits, 8), sorted_first(logits, 8))


def test_static_steps_take_arg_max_and_candidates_from_one_search(monkeypatch):
    """The same answers, lengths and matrix as by torch, and one search a step."""
    model, prompt = toy_model("llama"), [5, 6, 7, 8, 9]
    tree = build_template("best", nodes=6)
    eager = TokenRecycling(61, tree)
    expected = generate(Target(model), eager, prompt, max_new_tokens=12)
    searched, by_kernel = [], selection._by_kernel
    monkeypatch.setattr(selection, "_takes_kernel", lambda logits, k: True)
    monkeypatch.setattr(selection, "_by_kernel", lambda logits, k: searched.append(k) or by_kernel(logits.cpu(), k))
    monkeypatch.setattr(selection, "argmax", None)  # would fail if it were asked
    drafter = TokenRecycling(61, tree)
    found = generate(Target(model, execution="static"), drafter, prompt, max_new_tokens=12)
    assert found.steps == expected.steps
    assert torch.equal(drafter.matrix.candidates, eager.matrix.candidates)
    assert searched == [8] * len(found.steps)


def test_bits_are_those_of_torchs_search(monkeypatch):
    logits = torch.randn(3, 2048)
    best, bits = selection.top_k_and_bits(logits, 4)
    monkeypatch.setattr(selection, "_takes_kernel", lambda logits, k: True)
    monkeypatch.setattr(selection, "_by_kernel", lambda logits, k: sorted_first(logits, k))
    again, same = selection.top_k_and_bits(logits, 4)
    assert torch.equal(best, again) and torch.equal(bits, same)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler comes with its Linux wheel")
def test_kernels_compile_without_spills_for_gpus_without_one(tmp_path):
    from model.decoding.selection_kernel import GROUPS, WIDTH

    cases = []
    for capability, dtype, vocab, k in [(90, "bf16", 128256, 8), (80, "fp16", 32000, 8), (90, "fp32", 151936, 64)]:
        types = dict(logits_ptr=f"*{dtype}", maxima_ptr="*i64", best_ptr="*i64")
        fixed = dict(BLOCK_G=GROUPS, BLOCK_W=WIDTH)
        cases.append([KERNEL, "maxima_kernel", types, fixed, [*types, "logits_row"], {}, capability])
        fixed = dict(BLOCK_K=k, BLOCK_G=1 << (-(-vocab // WIDTH) - 1).bit_length(), BLOCK_W=WIDTH)
        options = dict(num_warps=4 if k <= 8 else 8)
        cases.append([KERNEL, "pick_kernel", types, fixed, [*types, "logits_row"], options, capability])
    for found in compile_for(cases, tmp_path):
        assert found["spilled"] == 0 and found["shared"] <= SHARED, found
