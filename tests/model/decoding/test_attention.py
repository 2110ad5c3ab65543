"""Tree attention: the torch twin against a naive softmax, the Triton kernel against the twin, both inside a model.

Where there is a GPU the kernel runs on it; elsewhere in Triton's interpreter, which has no bfloat16.
"""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.decoding import Tree
from model.decoding.attention import H200, KernelPlan, TreeAttention, tree_attention_reference
from model.errors import UserError
from tests.model.decoding.compiled import SHARED, compile_for
from tests.model.decoding.test_tree import random_tree

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
ROOT = Path(__file__).resolve().parents[3]
KERNEL = "model.decoding.attention_kernel"
NAN, HUGE = float("nan"), 6e4
BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]


def inputs(heads, kv_heads, dim, nodes, capacity, length, *, dtype=torch.float32, garbage=NAN, device="cpu"):
    """Random q (1, H, n, D) as a model makes it, k and v (1, Hkv, B, D) with garbage behind length + n, and a tree."""
    generator = torch.Generator().manual_seed(nodes * 1000 + length)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    q = draw(1, nodes, heads, dim).transpose(1, 2)
    k, v = draw(1, kv_heads, capacity, dim), draw(1, kv_heads, capacity, dim)
    k[:, :, length + nodes :], v[:, :, length + nodes :] = garbage, garbage
    tree = random_tree(nodes - 1, random.Random(nodes))
    return *(t.to(device) for t in (q, k, v)), torch.tensor(length, device=device), tree.ancestors.to(device)


def naive(q, k, v, length, ancestors, scale):
    """One head, one node at a time, in float64, over what the node may see and nothing else."""
    q, k, v = (t.double().cpu() for t in (q, k, v))
    out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
    n, committed = q.shape[2], int(length)
    mask = torch.cat((torch.ones(n, committed, dtype=torch.bool), ancestors.cpu()), dim=1)  # (n, length + n)
    for head in range(q.shape[1]):
        for node in range(n):
            rows = mask[node].nonzero().flatten()
            weights = (k[0, head // group, rows] @ q[0, head, node] * scale).softmax(0)
            out[0, head, node] = weights @ v[0, head // group, rows]
    return out


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 128 - 20])  # the last fills the capacity
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (4, 4), (8, 2), (8, 8)])
def test_twin_is_a_masked_softmax(heads, kv_heads, length):
    q, k, v, where, ancestors = inputs(heads, kv_heads, 8, 20, 128, length)
    got = tree_attention_reference(q, k, v, where, ancestors, 0.3)
    torch.testing.assert_close(got.double(), naive(q, k, v, where, ancestors, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("garbage", [NAN, HUGE, -HUGE, float("inf")])
def test_twin_ignores_what_lies_behind_the_draft(garbage):
    q, k, v, length, ancestors = inputs(4, 2, 8, 5, 64, 17)
    clean = tree_attention_reference(q, k.nan_to_num(0.0), v.nan_to_num(0.0), length, ancestors)
    k, v = (torch.where(t.isnan(), garbage, t) for t in (k, v))
    assert torch.equal(tree_attention_reference(q, k, v, length, ancestors), clean)


def test_twin_keeps_the_type_and_sums_in_float32():
    q, k, v, length, ancestors = inputs(4, 2, 16, 7, 64, 40, dtype=torch.bfloat16, garbage=0.0)
    got = tree_attention_reference(q, k, v, length, ancestors)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, naive(q, k, v, length, ancestors, 16**-0.5).to(torch.bfloat16))


CASES = [  # heads, kv_heads, dim, nodes, capacity, length, dtype; small, as the interpreter takes 10 ms a program
    (1, 1, 16, 1, 32, 0, torch.float32),
    (2, 2, 32, 8, 40, 32, torch.float16),  # the draft fills the capacity and begins on a block's edge
    (4, 1, 64, 4, 64, 15, torch.float32),
    (8, 1, 16, 9, 64, 1, torch.float16),  # 72 query rows: two blocks
    (4, 2, 80, 3, 96, 65, torch.float16),  # D is padded to 128
    (2, 1, 96, 3, 64, 7, torch.float32),
    (1, 1, 128, 24, 192, 100, torch.float16),
    (1, 1, 256, 2, 32, 16, torch.float32),
    (1, 1, 16, 81, 160, 40, torch.float16),  # more nodes than a word of the packed tree has bits
]
BFLOAT = pytest.param(
    (4, 2, 128, 24, 192, 100, torch.bfloat16),
    marks=pytest.mark.skipif(not CUDA, reason="Triton's interpreter multiplies no bfloat16; needs a GPU"),
)


@needs_triton
@pytest.mark.parametrize("case", [*CASES, BFLOAT], ids=lambda c: "-".join(map(str, c)).replace("torch.", ""))
def test_kernel_equals_the_twin(case):
    *sizes, dtype = case
    q, k, v, length, ancestors = inputs(*sizes, dtype=dtype, device=DEVICE)
    attention = TreeAttention(*sizes[:5], length, dtype, backend="triton")
    attention.set_tree(ancestors)
    for stale in (attention.partial, attention.maxima, attention.sums, attention.output):
        stale.fill_(NAN)
    got = attention(q, k, v, scale=0.2).clone()
    close = dict(rtol=2e-5, atol=2e-5) if dtype == torch.float32 else dict(rtol=1e-2, atol=4e-3)
    torch.testing.assert_close(got, tree_attention_reference(q, k, v, length, ancestors, 0.2), **close)
    assert torch.equal(attention(q, k, v, scale=0.2), got)  # the same bits again


@needs_triton
@pytest.mark.parametrize("block_n", [16, 64])
def test_kernel_is_right_at_every_length_and_cut(block_n):
    """One object, its length and tree changed in place, as a captured graph sees it."""
    nodes, capacity, length = 9, 3 * block_n, torch.zeros((), dtype=torch.int32, device=DEVICE)
    plan = KernelPlan(block_m=16, block_n=block_n, splits=2)
    attention = TreeAttention(2, 1, 16, nodes, capacity, length, torch.float32, backend="triton", plan=plan)
    for committed in (0, 1, block_n - nodes, block_n - 1, block_n, 2 * block_n + 1, capacity - nodes):
        q, k, v, _, _ = inputs(2, 1, 16, nodes, capacity, committed, device=DEVICE)
        ancestors = random_tree(nodes - 1, random.Random(committed)).ancestors.to(DEVICE)
        length.fill_(committed)
        attention.set_tree(ancestors)
        expected = tree_attention_reference(q, k, v, length, ancestors)
        torch.testing.assert_close(attention(q, k, v), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(not CUDA, reason="needs a GPU: a CUDA graph is captured")
@needs_triton
def test_a_captured_graph_follows_length_and_tree():
    q, k, v, length, ancestors = inputs(8, 2, 64, 24, 512, 100, dtype=torch.float16, device=DEVICE)
    k, v = k.nan_to_num(0.5), v.nan_to_num(0.5)
    attention = TreeAttention(8, 2, 64, 24, 512, length, torch.float16)
    assert attention.backend == "triton"
    attention(q, k, v)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    for committed, seed in ((100, 1), (0, 2), (488, 3), (257, 4)):
        ancestors = random_tree(23, random.Random(seed)).ancestors.to(DEVICE)
        length.fill_(committed)
        attention.set_tree(ancestors)
        graph.replay()
        expected = tree_attention_reference(q, k, v, length, ancestors)
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_smaller_tree_is_padded(backend):
    q, k, v, length, _ = inputs(2, 1, 16, 9, 64, 20, device=DEVICE)
    attention = TreeAttention(2, 1, 16, 9, 64, length, torch.float32, backend=backend)
    attention.set_tree(torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril())
    small = random_tree(4, random.Random(0)).ancestors.to(DEVICE)
    attention.set_tree(small)
    expected = tree_attention_reference(q[:, :, :5], k, v, length, small)
    got = attention(q, k, v)
    torch.testing.assert_close(got[:, :, :5], expected, rtol=2e-5, atol=2e-5)
    assert got.isfinite().all()


@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("nodes", [16, 24, 81])
def test_the_plan_fills_a_large_gpu_at_a_short_context(kv_heads, nodes):
    for capacity in (1024, 2048, 4096 + 160):  # the last: one bucket for a whole context of 4096
        plan = KernelPlan.choose(32 // kv_heads * nodes, kv_heads, 128, capacity, 2, H200)
        blocks = -(-(500 + nodes) // plan.block_n)
        share = -(-blocks // plan.splits)
        busy = kv_heads * -(-32 // kv_heads * nodes // plan.block_m) * -(-blocks // share)
        assert busy >= 0.9 * 132, plan


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler comes with its Linux wheel")
def test_kernels_compile_for_gpus_without_one(tmp_path):
    """Chained and single nodes are compiled as constants. Nothing is spilled."""
    cases = []
    for capability, dtype, dim, plan, ones in [
        (90, "bf16", 128, KernelPlan.choose(324, 8, 128, 2048, 2, H200), []),
        (80, "fp16", 128, KernelPlan.choose(81, 32, 128, 4096, 2, (108, 163 << 10)), []),
        (86, "fp16", 80, KernelPlan.choose(1, 32, 80, 9000, 2, (84, 99 << 10)), ["words", "group", "nodes"]),
    ]:
        pointers = dict(q_ptr="*T", k_ptr="*T", v_ptr="*T", out_ptr="*T", length_ptr="*i64", tree_ptr="*i64")
        types = {name: kind.replace("T", dtype) for name, kind in pointers.items()}
        types |= dict(acc_ptr="*fp32", top_ptr="*fp32", norm_ptr="*fp32", scale="fp32")
        aligned = [*types, "q_head", "k_head", "v_head", "k_row", "v_row"]
        aligned.remove("scale")
        fixed = dict(D=dim, SPLITS_2=1 << (plan.splits - 1).bit_length(), BLOCK_M=plan.block_m, BLOCK_N=plan.block_n)
        fixed |= dict(BLOCK_D=1 << (dim - 1).bit_length()) | dict.fromkeys(ones, 1)
        options = dict(num_warps=plan.warps, num_stages=plan.stages)
        for name in ("split_kernel", "reduce_kernel"):
            cases.append([KERNEL, name, types, fixed, aligned, options, capability])
    for found in compile_for(cases, tmp_path):
        assert found["shared"] <= SHARED and found["spilled"] == 0, found


def test_importing_the_module_loads_no_triton():
    code = """
import sys, torch, transformers.cache_utils
before = set(sys.modules)
import model.decoding.attention_switch
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
sys.exit("triton" in loaded or "model.decoding.attention_kernel" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(backend="flash"), "none of triton, torch"),
        (dict(heads=3), "multiple of the KV heads"),
        (dict(capacity=3), "capacity must hold the nodes"),
        (dict(length=torch.zeros(1)), "one int32 or int64"),
        (dict(backend="triton", head_dim=20), "not 20"),
        (dict(backend="triton", dtype=torch.float64), "float64"),
    ],
)
def test_mistakes_are_named(change, says):
    arguments = dict(heads=4, kv_heads=2, head_dim=16, nodes=5, capacity=64, length=torch.tensor(3))
    with pytest.raises(UserError, match=says):
        TreeAttention(**(arguments | dict(dtype=torch.float32) | change))


def test_what_would_be_ignored_is_refused():
    q, k, v, length, _ = inputs(4, 2, 16, 5, 64, 3)
    attention = TreeAttention(4, 2, 16, 5, 64, length, torch.float32, backend="torch")
    for wrong in (dict(q=q[:, :, :4]), dict(k=k[..., :8]), dict(v=v.half())):
        with pytest.raises(UserError, match=f"{next(iter(wrong))} must be"):
            attention(**(dict(q=q, k=k, v=v) | wrong))
    with pytest.raises(UserError, match="m <= 5"):
        attention.set_tree(torch.eye(6, dtype=torch.bool))
    assert Tree.chain(4).ancestors.shape == (5, 5)
