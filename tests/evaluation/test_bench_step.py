"""The step bench as a command, its derived columns."""

import json
from importlib.metadata import version
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from evaluation import answerers, bench_step
from evaluation.bench_step import DraftedSteps, HfSteps
from evaluation.loading import stock
from evaluation.loading.models import LoadedModel, random_model
from evaluation.loading.settings import ModelSettings
from model.engine import Target, devices


@pytest.fixture
def tiny():
    return random_model(
        "tiny", ModelSettings("tiny", "random weights", device="cpu", linear="torch")
    ).target


@pytest.mark.parametrize(
    "wrong, said",
    [
        (["--shape", "huge"], "--shape huge: unknown; use vicuna-7b"),
        (
            ["--shape", "tiny", "model=embedded"],
            "model=embedded: --shape tiny takes random weights",
        ),
        (["model=nothing"], "Could not find 'model/nothing'"),
        (["model=path", "model.path=nowhere/at/all"], "model nowhere/at/all: no such folder"),
        (["model.dtype=float8"], "model.dtype=float8: use one of auto, float32"),
        (["bench=sample"], "bench=sample: only model=NAME and model.KEY=VALUE count here"),
        (["--nodes", "1,x"], "--nodes 1,x: must be whole numbers"),
        (["--batch", "0"], "--batch 0: must be whole numbers from 1 to 512"),
        (["model.context=0"], "context=0: must be at least 2"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--shape", "tiny", "--context", "4096"], "--context 4096: must be from 2 to "),
    ],
)
def test_a_wrong_flag_is_one_line(call, wrong, said):
    outcome = call(bench_step.main, *wrong)
    assert outcome.code == 2 and said in outcome.err and outcome.err.count("\n") == 1


def test_hf_attends_without_cudnn(tiny, monkeypatch):
    """As metadata, notes and documents say of both: its plan for each new length would make hf slower."""
    seen, cuda, enabled = [], torch.device("cuda"), torch.backends.cuda.cudnn_sdp_enabled
    monkeypatch.setattr(stock, "without_cudnn", lambda device: devices.without_cudnn(cuda))
    tiny.model.register_forward_pre_hook(lambda *given: seen.append(enabled()))
    loaded = LoadedModel(None, tiny, None, "raw", frozenset())
    HfSteps(loaded, [5, 6, 7]).take_turn()
    answerers.TransformersGenerate(loaded, None, {}, "eager").answer([5, 6, 7], 4)
    assert len(seen) == 10 + 4 and not any(seen) and enabled()


def test_a_table_and_one_json_object(call):
    words = ["--shape", "tiny", "model.dtype=bfloat16", "--nodes", "3,1", "--batch", "1,3"]
    outcome = call(bench_step.main, *words, "--context", 20, "--rounds", 1)
    assert outcome.code == 0, outcome.err
    *table, last = outcome.out.splitlines()
    result = json.loads(last)
    assert result["context"] == 20 and result["model"]["dtype"] == "bfloat16"
    assert result["device"] and result["versions"]["torch"] == version("torch")
    steps = result["steps"]
    assert [(row["batch"], row["nodes"]) for row in steps] == [*product((1, 3), (0, 1, 3))]
    for row in steps:
        plain = next(one for one in steps if one["batch"] == row["batch"])
        assert row["over_plain"] == row["seconds"] / plain["seconds"] > 0
        parts = ["draft", "forward", "verify", "commit", "learn"] if row["batch"] == 1 else []
        assert list(row["parts_s"]) == parts and all(row["parts_s"].values())
        cells = [f"{1e3 * row['seconds']:.3f}", f"{row['over_plain']:.2f}"]
        assert any(line.split()[:3] == [str(row["nodes"]), *cells] for line in table)


@pytest.mark.parametrize(
    ("execution", "size", "rows"), [("eager", 1, 5), ("static", 1, 5), ("eager", 3, 15)]
)
def test_a_turn_begins_behind_the_prompt_and_is_of_its_size(tiny, execution, size, rows):
    forwarded = []
    positions = []

    def note(module, args, given):
        if "position_ids" in given:  # a step's
            forwarded.append(given["input_ids"].shape[1])
            positions.append(int(given["position_ids"].max()))

    prompt = [*range(5, 45)]
    steps = DraftedSteps(tiny, prompt, execution, 4, size)
    tiny.model.register_forward_pre_hook(note, with_kwargs=True)
    steps.take_turn()
    forwarded.clear()
    steps.take_turn()
    assert forwarded[-bench_step.STEPS :] == [rows] * bench_step.STEPS
    assert max(forwarded) <= rows, "the prompt is not forwarded again"
    assert max(positions) < 40 + 5 * (bench_step.UNCOUNTED + bench_step.STEPS)
    assert len(steps.seconds) == 2 and bool(steps.parts) == (execution == "eager" and size == 1)


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_times_are_also_over_the_floor_and_next_to_compiled_steps(
    call, monkeypatch, fails
):
    """Captured steps are static ones here, and a byte is read in a nanosecond."""
    monkeypatch.setattr(bench_step, "captures", lambda target: True)
    chosen = SimpleNamespace(why="as on a GPU")
    monkeypatch.setattr(bench_step, "choose_execution", lambda target: chosen)
    monkeypatch.setattr(
        Target, "check_execution", lambda target, name: name.replace("graph", "static")
    )
    monkeypatch.setattr(bench_step, "LARGE", 4000)
    reads = SimpleNamespace(timeit=lambda number: SimpleNamespace(mean=4e-6))
    monkeypatch.setattr(bench_step, "Timer", lambda statement, globals: reads)
    if fails:
        monkeypatch.setattr(stock, "StaticCache", lambda **settings: 1 / 0)
    words = ["--shape", "tiny", "model.dtype=bfloat16", "--nodes", "1", "--context", 20]
    outcome = call(bench_step.main, *words, "--rounds", 1, "--batch", "1,3")
    assert outcome.code == 0, outcome.err
    *table, last = outcome.out.splitlines()
    result = json.loads(last)
    # weights of the head, of two layers and of the last norm
    untied = 64 * (256 + 2 * (4 * 64 + 3 * 128 + 2) + 1)
    cached = 19 * 2 * 2 * 64  # tokens before the last, keys and values, layers, width
    assert result["floor_s"] == {
        "weights": pytest.approx(2e-9 * untied),
        "cache": pytest.approx(2e-9 * cached),
    }
    assert any("left out: " in line for line in table) == fails == ("hf_compiled_s" not in result)
    titles = ["eager:", "graph:", "eager, batch 3:", "graph, batch 3:"]
    assert set(titles) <= {*table}
