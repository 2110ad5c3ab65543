"""The kernel of the greatest logits against a stable sort. On a GPU where there is one, else in the interpreter."""

import sys
from types import SimpleNamespace

import pytest
import torch

from model.decoding import Target, generate, selection
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model
from tests.model.decoding.compiled import SHARED, compile_for

pytest.importorskip("triton")
from model.decoding.selection_kernel import GROUPS, WIDTH, launch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


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
    window = torch.cat((ties, noise), dim=1).to(DEVICE)[:, vocab:]  # rows that are further apart than they are long
    return [*(rows.to(DEVICE) for rows in (noise, ties, edges, noise - 100)), window]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("vocab", "k"), [(5, 5), (61, 8), (128, 1), (300, 3), (2500, 8), (700, 64)])
def test_the_kernel_is_a_stable_sort(vocab, k, dtype):
    for logits in rows_of(vocab, dtype):
        assert torch.equal(launch(logits, k), sorted_first(logits, k))


def test_rows_of_any_layout():
    logits = torch.randn(50, 6, device=DEVICE).t()  # the last dimension's stride is not one
    assert torch.equal(launch(logits, 4), sorted_first(logits, 4))


def test_static_steps_take_arg_max_and_candidates_from_one_search(monkeypatch):
    """The same answers, lengths and matrix as by torch, and one search a step."""
    model, prompt = toy_model("llama").to(DEVICE), [5, 6, 7, 8, 9]
    tree, searched = build_template("best", nodes=6), []
    eager = TokenRecycling(61, tree, device=DEVICE)
    expected = generate(Target(model), eager, prompt, max_new_tokens=12)

    def counted(logits, k):
        searched.append(k)
        return launch(logits, k)

    monkeypatch.setattr(selection, "_kernel", lambda logits, k: SimpleNamespace(launch=counted))
    monkeypatch.setattr("model.decoding.sampling.argmax", None)  # would fail if it were asked
    drafter = TokenRecycling(61, tree, device=DEVICE)
    found = generate(Target(model, execution="static"), drafter, prompt, max_new_tokens=12)
    assert found.steps == expected.steps
    assert torch.equal(drafter.matrix.candidates, eager.matrix.candidates)
    assert searched == [8] * len(found.steps)


def test_bits_are_those_of_torchs_search(monkeypatch):
    logits = torch.randn(3, 2048)
    best, bits = selection.top_k_and_bits(logits, 4)
    monkeypatch.setattr(selection, "_kernel", lambda logits, k: SimpleNamespace(launch=sorted_first))
    again, same = selection.top_k_and_bits(logits, 4)
    assert torch.equal(best, again) and torch.equal(bits, same)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler comes with its Linux wheel")
def test_kernels_compile_without_spills_for_gpus_without_one(tmp_path):
    cases = []
    for capability, dtype, vocab, k in [(90, "bf16", 128256, 8), (80, "fp16", 32000, 8), (90, "fp32", 151936, 64)]:
        types = dict(logits_ptr=f"*{dtype}", maxima_ptr="*i64", best_ptr="*i64")
        fixed = dict(BLOCK_G=GROUPS, BLOCK_W=WIDTH)
        cases.append([selection.KERNEL, "maxima_kernel", types, fixed, [*types, "logits_row"], {}, capability])
        fixed = dict(BLOCK_K=k, BLOCK_G=1 << (-(-vocab // WIDTH) - 1).bit_length(), BLOCK_W=WIDTH)
        options = dict(num_warps=4 if k <= 8 else 8)
        cases.append([selection.KERNEL, "pick_kernel", types, fixed, [*types, "logits_row"], options, capability])
    for found in compile_for(cases, tmp_path):
        assert found["spilled"] == 0 and found["shared"] <= SHARED, found
