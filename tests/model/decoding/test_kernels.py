"""A step's small kernels: used only where a trial was passed, and then step by step what torch's own form gives."""

import importlib.util
import random
import sys

import pytest
import torch

from model.decoding import Draft, Target, Tree, generate, kernels, selection, settlement
from model.decoding.settlement import Settlement
from model.decoding.verification import verify
from model.recycling import TokenRecycling, build_template, drafter
from model.recycling.auto import SIZES, AutoRecycling
from model.vanilla import Vanilla
from tests.conftest import toy_model
from tests.model.decoding.kernels import SHARED, compile_for
from tests.model.decoding.test_tree import random_tree

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
V = 61
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
FORMS = [False, pytest.param(True, marks=needs_triton)]


@pytest.mark.parametrize("by_kernel", FORMS)
@pytest.mark.parametrize("seed", range(8))
def test_a_settlement_is_the_walk_over_lists(by_kernel, seed):
    rng = random.Random(seed)
    tree = random_tree(rng.randint(0, 30), rng)
    length = torch.tensor(40, device=DEVICE)
    own, before = Settlement(tree.on(DEVICE), length, by_kernel=by_kernel), 40
    for _ in range(5):
        tokens, candidates = torch.randint(0, 3, (len(tree),)), torch.randint(0, 3, (len(tree), 4))
        choices = candidates[:, 0]
        own(tokens.to(DEVICE), candidates.to(DEVICE)[:, 0])
        expected = verify(Draft(tree, tokens), choices)
        node, *chosen = own.read()
        depth = tree.depth_of[node]
        assert (node, chosen[: depth + 1]) == (expected.node, expected.tokens)
        assert own.stands.tolist() == expected.stands.tolist()
        assert (own.source - before).tolist()[: depth + 1] == expected.path
        assert (own.to - before).tolist() == list(range(tree.max_depth + 1))
        assert int(own.root) == expected.tokens[-1] and int(length) == before + len(expected.tokens)
        before = int(length)


@needs_triton
@pytest.mark.parametrize("name", ["verification", "matrix", "top-k"])
def test_the_trials_pass(name, monkeypatch):
    """On a GPU natively; the interpreter knows no bfloat16."""
    if not CUDA:
        monkeypatch.setattr(torch, "bfloat16", torch.float16)
    assert kernels._trials[name](DEVICE) == ""


def wrong(*arguments, **settings):
    """A kernel that does nothing, as one might on a device that it was not made for."""
    return torch.zeros(5, 8, dtype=torch.long)


@needs_triton
@pytest.mark.parametrize(
    ("name", "place", "says"),
    [
        ("verification", "model.decoding.settlement_kernel.launch", "does not settle a tree of 1 nodes"),
        ("matrix", "model.recycling.matrix_kernel.write", "do not grow and write as the matrix does"),
        ("matrix", "model.recycling.matrix_kernel.grow", "do not grow and write as the matrix does"),
        ("top-k", "model.decoding.selection_kernel.launch", "the kernel's top-k is not torch's in torch.float16"),
    ],
)
def test_what_is_wrong_or_fails_is_not_used(name, place, says, monkeypatch):
    def broken(*arguments, **settings):
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr(kernels, "triton_problem", lambda device: "")
    problem = kernels.problem.__wrapped__
    monkeypatch.setattr(place, wrong)
    assert says in problem(name, DEVICE)
    monkeypatch.setattr(place, broken)
    assert problem(name, DEVICE) == "RuntimeError: no such instruction"


def test_without_cuda_or_triton_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(kernels, "_trials", {"matrix": None})  # would fail if it were called
    assert kernels.problem.__wrapped__("matrix", torch.device("cpu")) == "not a CUDA device"
    assert kernels.problems(torch.device("cpu")) == {}, "a CPU has nothing to miss"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert kernels.problem.__wrapped__("matrix", torch.device("cuda", 0)) == "compute capability below 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("model.decoding.devices.triton_installed", lambda: False)
    monkeypatch.setattr(kernels, "problem", kernels.problem.__wrapped__)
    assert kernels.problems(torch.device("cuda", 0)) == {"matrix": "triton is not installed"}


MAKE = {
    "vanilla": lambda: Vanilla(DEVICE),
    "recycling": lambda: TokenRecycling(V, build_template("2.2.2"), device=DEVICE, eos={9, 11}),
    "path": lambda: TokenRecycling(V, build_template("best", nodes=9), device=DEVICE, update="path", eos={9}),
    "root": lambda: TokenRecycling(V, build_template("best", nodes=9), device=DEVICE, update="root"),
    "int32": lambda: TokenRecycling(V, build_template("chain", depth=3, k=2), k=2, dtype=torch.int32, device=DEVICE),
    "auto": lambda: AutoRecycling(V, step_seconds={n: 1 + n / 30 for n in SIZES}, device=DEVICE),
}


@needs_triton
@pytest.mark.parametrize("method", MAKE)
def test_steps_by_kernels_are_steps_by_torch(method, monkeypatch):
    model = toy_model("llama").to(DEVICE)

    def answers():
        own = MAKE[method]()
        outs = [
            generate(Target(model, execution="static"), own, [5, 6, 7 + i], max_new_tokens=12, eos={9})
            for i in range(2)
        ]
        return [(out.tokens, out.steps) for out in outs], {n: t.tolist() for n, t in own.state_dict().items()}

    with monkeypatch.context() as off:
        off.setattr(kernels, "problem", lambda name, device: "left out")
        expected = answers()
    by_kernel = selection._by_kernel
    monkeypatch.setattr(kernels, "problem", lambda name, device: "")
    monkeypatch.setattr(selection, "_takes_kernel", lambda logits, k: True)
    monkeypatch.setattr(
        selection, "_by_kernel", lambda logits, k: by_kernel(logits.clone(), k)
    )  # not an inference view
    assert answers() == expected


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler comes with its Linux wheel")
def test_they_compile_without_spills_for_gpus_without_one(tmp_path):
    numbers = ("tokens", "choices", "parents", "depths", "paths", "root", "length", "report", "source", "to", "ranks")
    numbers += ("candidates", "best", "eos")
    types = {f"{name}_ptr": "*i64" for name in numbers} | {"stands_ptr": "*i8"}
    settle, matrix = "model.decoding.settlement_kernel", "model.recycling.matrix_kernel"
    cases = []
    for capability, block in ((80, 128), (90, 128), (90, 512)):
        one_warp = dict(num_warps=1)
        cases.append([settle, "settle_kernel", types, dict(BLOCK=block, BLOCK_D=8), [], one_warp, capability])
        cases.append([matrix, "grow_kernel", types, dict(BLOCK=block), [], one_warp, capability])
        for only in (False, True):
            fixed = dict(BLOCK=block, BLOCK_K=8, ONLY_STANDING=only)
            cases.append([matrix, "write_kernel", types, fixed, [], dict(num_warps=4), capability])
    # an int32 matrix, and a tree of the root alone, whose sizes are constants
    cases.append([matrix, "write_kernel", types | {"candidates_ptr": "*i32"}, fixed, [], {}, 90])
    single = dict(BLOCK=1, BLOCK_D=1, nodes=1)
    cases.append([settle, "settle_kernel", types, single, [], one_warp, 90])
    for found in compile_for(cases, tmp_path):
        assert found["spilled"] == 0 and found["shared"] <= SHARED, found


def test_a_tree_too_large_for_one_program_is_settled_by_torch(monkeypatch):
    monkeypatch.setattr(kernels, "problem", lambda name, device: "")
    monkeypatch.setattr(settlement, "MOST_NODES", 4)
    monkeypatch.setattr(drafter, "MOST_NODES", 4)
    tree = Tree.chain(4)
    assert not Settlement(tree, torch.tensor(3))._by_kernel and not TokenRecycling(V, tree)._by_kernel
    tree = Tree.chain(3)
    assert Settlement(tree, torch.tensor(3))._by_kernel and TokenRecycling(V, tree)._by_kernel
