"""A step's small kernels: used only where a trial was passed, and then step by step what torch's own form gives."""

import importlib
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
from tests.model.decoding.compiled import SHARED, compile_for
from tests.model.decoding.test_tree import random_tree

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
FIRST = torch.device("cuda", 0)
V = 61
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
FORMS = ["torch", pytest.param("kernels", marks=needs_triton)]


def imported(path, device, *size):
    """As if all trials were passed."""
    return importlib.import_module(path)


def nothing(path, device, *size):
    """As if none was."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(8))
def test_a_settlement_is_the_walk_over_lists(form, seed, monkeypatch):
    monkeypatch.setattr(kernels, "load", imported if form == "kernels" else nothing)
    rng = random.Random(seed)
    tree = random_tree(rng.randint(0, 30), rng)
    length = torch.tensor(40, device=DEVICE)
    own, before = Settlement(tree.on(DEVICE), length), 40
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


I64, I32 = torch.int64, torch.int32
TRIALS = [
    *((settlement.KERNEL, size) for size in ((1, 1, 1), (2, 2, 8), (16, 16, 1), (10, 4, 3), (81, 7, 8))),
    *((drafter.KERNEL, size) for size in ((1, 1, 1, I64, 0), (60, 6, 3, I32, 2), (81, 7, 8, I64, 1))),
    *((drafter.KERNEL, size) for size in ((5, 1, 8, I64, 1), (10, 4, 1, I64, 0))),  # chains beside a smaller tree
    *((selection.KERNEL, size) for size in ((61, 8, torch.float32), (2500, 3, torch.float16))),
]
LARGE = [
    *((settlement.KERNEL, size) for size in ((512, 8, 8), (512, 512, 1), (500, 20, 16))),
    *((drafter.KERNEL, size) for size in ((512, 20, 16, I64, 1), (128, 6, 64, I32, 2), (41, 41, 8, I64, 0))),
    *((selection.KERNEL, (v, k, torch.bfloat16)) for v in (32000, 32001, 128256, 151936) for k in (8, 64)),
]


@needs_triton
@pytest.mark.parametrize(("path", "size"), TRIALS)
def test_trials_are_passed(path, size, monkeypatch):
    load = kernels.load

    def asked(path, device, *size):
        assert path == drafter.KERNEL and device.type == "cpu", "what a trial asks for would be its own outcome"
        return load(path, device, *size)

    monkeypatch.setattr(kernels, "load", asked)
    assert imported(path, DEVICE).trial(DEVICE, *size) == ""


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("path", "size"), LARGE)
def test_large_trials_are_passed(path, size):
    assert kernels._tried(path, DEVICE, *size) == ""


@needs_triton
@pytest.mark.parametrize(
    ("path", "function", "size"),
    [
        (settlement.KERNEL, "launch", (4, 3, 1)),
        (drafter.KERNEL, "write", (30, 5, 4, I64, 1)),
        (drafter.KERNEL, "grow", (30, 5, 4, I64, 1)),
        (selection.KERNEL, "launch", (500, 4, torch.float32)),
    ],
)
def test_what_is_wrong_or_fails_is_not_used(path, function, size, monkeypatch):
    module = imported(path, DEVICE)
    own, name = getattr(module, function), f"{path.split('.')[-1]} ({', '.join(map(str, size))})"
    monkeypatch.setattr(kernels, "triton_problem", lambda device: "")
    monkeypatch.setattr(kernels, "missed", {})
    monkeypatch.setattr(kernels, "_tried", lambda path, device, *size: _tried(path, DEVICE, *size))  # also without one
    monkeypatch.setattr(kernels, "_loaded", kernels._loaded.__wrapped__)
    before = kernels.setup_s()
    assert kernels.load(path, FIRST, *size) is module and not kernels.missed
    assert kernels.setup_s() > before, "it is told from decoding"

    def idle(*arguments, **settings):
        """It runs and does nothing, as a kernel might on a device that it was not made for."""
        if path == selection.KERNEL:
            return torch.zeros_like(own(*arguments))

    monkeypatch.setattr(module, function, idle)
    assert kernels.load(path, FIRST, *size) is None
    assert list(kernels.missed) == [name] and kernels.missed[name].startswith(("does not", "not the 4 greatest of 500"))

    def broken(*arguments, **settings):
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr(module, function, broken)
    assert kernels.load(path, FIRST, *size) is None
    assert kernels.missed == {name: "RuntimeError: no such instruction"}


_tried = kernels._tried


def test_without_cuda_or_triton_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(kernels, "_tried", None)  # would fail if it were called
    monkeypatch.setattr(kernels, "missed", {})
    monkeypatch.setattr(kernels, "_loaded", kernels._loaded.__wrapped__)
    assert kernels.load(drafter.KERNEL, torch.device("cpu"), 8) is None and kernels.missed == {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert kernels.load(drafter.KERNEL, FIRST, 8) is None
    assert kernels.missed == {"matrix_kernel (8)": "compute capability below 8.0"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("model.decoding.devices.triton_installed", lambda: False)
    assert kernels.load(drafter.KERNEL, FIRST, 8) is None
    assert kernels.missed == {"matrix_kernel (8)": "triton is not installed"}


def test_ranks_agree(monkeypatch):
    """Where one rank does without a kernel, all do: they would break ties in two ways."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    others = ["", "wrong", "out of memory"]

    def gather(found, own):
        found[:] = others

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert kernels._agreed("") == "wrong"
    others[:] = [""] * 3
    assert kernels._agreed("") == ""


def test_what_one_program_does_not_take_goes_by_torch(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "load", lambda path, device, *size: asked.append((path, *size)))
    for n in (513, 512):
        Settlement(Tree.chain(n - 1), torch.tensor(3))(*torch.zeros(2, n, dtype=torch.long))
        TokenRecycling(V, Tree.chain(n - 1)).grow(torch.tensor([4]))
    assert asked == [(settlement.KERNEL, 512, 512, 1), (drafter.KERNEL, 512, 512, 8, I64, 0)]
    asked.clear()
    for nodes, k in ((128, 64), (129, 64), (128, 61)):
        TokenRecycling(64, Tree.chain(nodes - 1), k=k).grow(torch.tensor([4]))
    assert asked == [(drafter.KERNEL, 128, 128, 64, I64, 0), (drafter.KERNEL, 128, 128, 61, I64, 0)]
    asked.clear()
    for k, dtype in ((64, torch.float16), (65, torch.float16), (8, torch.float64)):
        selection.top_k(torch.zeros(2, 100, dtype=dtype), k)
    assert asked == [(selection.KERNEL, 100, 64, torch.float16)]


MAKE = {
    "vanilla": lambda: Vanilla(DEVICE),
    "recycling": lambda: TokenRecycling(V, build_template("best", nodes=20), device=DEVICE, eos={9, 11}),
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

    monkeypatch.setattr(kernels, "load", nothing)
    expected = answers()
    monkeypatch.setattr(kernels, "load", imported)
    assert answers() == expected


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler comes with its Linux wheel")
def test_they_compile_without_spills_for_gpus_without_one(tmp_path):
    numbers = ("tokens", "choices", "parents", "depths", "paths", "root", "length", "report", "source", "to", "ranks")
    numbers += ("candidates", "best", "eos")
    types = {f"{name}_ptr": "*i64" for name in numbers} | {"stands_ptr": "*i8"}
    settle, matrix = settlement.KERNEL, drafter.KERNEL
    cases = []
    for capability, block, k in ((80, 128, 8), (90, 128, 8), (90, kernels.MOST_NODES, 16), (90, 128, 64)):
        assert kernels.fits(block, k)
        one_warp = dict(num_warps=1)
        cases.append([settle, "settle_kernel", types, dict(BLOCK=block, BLOCK_D=8), [], one_warp, capability])
        cases.append([matrix, "grow_kernel", types, dict(BLOCK=block), [], one_warp, capability])
        for only in (False, True):
            fixed = dict(BLOCK=block, BLOCK_K=k, ONLY_STANDING=only)
            cases.append([matrix, "write_kernel", types, fixed, [], dict(num_warps=4), capability])
    # an int32 matrix, and a tree of the root alone, whose sizes are constants
    cases.append([matrix, "write_kernel", types | {"candidates_ptr": "*i32"}, fixed, [], {}, 90])
    single = dict(BLOCK=1, BLOCK_D=1, nodes=1)
    cases.append([settle, "settle_kernel", types, single, [], one_warp, 90])
    for found in compile_for(cases, tmp_path):
        assert found["spilled"] == 0 and found["shared"] <= SHARED, found
