"""The step bench as a command, its derived columns."""

import json
from importlib.metadata import version

import pytest
import torch

from evaluation import answerers, bench_step, first_contact
from evaluation.bench_step import DraftedSteps, HfSteps
from evaluation.loading.models import LoadedModel, random_model
from evaluation.loading.settings import ModelSettings
from model.engine import devices


@pytest.fixture
def tiny():
    return random_model("tiny", ModelSettings("tiny", "random weights", device="cpu", linear="torch")).target


@pytest.mark.parametrize(
    "model", [["model=embedded", "model.linear=torch"], ["--shape", "tiny", "model.dtype=bfloat16"]]
)
def test_a_table_and_one_json_object(call, model):
    outcome = call(bench_step.main, *model, "--nodes", "3,1", "--context", 20, "--rounds", 1)
    assert outcome.code == 0, outcome.err
    *table, last = outcome.out.splitlines()
    result = json.loads(last)
    assert result["context"] == 20 and result["model"]["dtype"] in ("float32", "bfloat16")
    assert result["device"] and result["versions"]["torch"] == version("torch") and "commit" in result["git"]
    assert [row["nodes"] for row in result["steps"]] == [0, 1, 3]
    for row in result["steps"]:
        assert row["over_plain"] == row["seconds"] / result["steps"][0]["seconds"]
        assert row["execution"] == "eager" and row["seconds"] > 0
        assert list(row["parts_s"]) == ["draft", "forward", "verify", "commit", "learn"]
        assert all(seconds > 0 for seconds in row["parts_s"].values())
        cells = [f"{1e3 * row['seconds']:.3f}", f"{row['over_plain']:.2f}"]
        assert any(line.split()[:3] == [str(row["nodes"]), *cells] for line in table)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (["--shape", "huge"], "--shape huge: unknown; use vicuna-7b"),
        (["--shape", "tiny", "model=embedded"], "model=embedded: --shape tiny takes random weights"),
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
    for module in (bench_step, answerers):
        monkeypatch.setattr(module, "without_cudnn", lambda device: devices.without_cudnn(cuda))
    tiny.model.register_forward_pre_hook(lambda *given: seen.append(enabled()))
    loaded = LoadedModel(None, tiny, None, "raw", frozenset())
    HfSteps(loaded, [5, 6, 7]).take_turn()
    answerers.TransformersGenerate(loaded, None, {}, "eager").answer([5, 6, 7], 4)
    assert len(seen) == 10 + 4 and not any(seen) and enabled()


@pytest.mark.parametrize("execution", ["eager", "static"])
def test_a_turn_stays_behind_its_context_and_is_of_its_size(tiny, execution):
    rows = []
    tiny.model.register_forward_pre_hook(
        lambda module, args, given: rows.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with tiny.cache(5) as cache:
        tiny.prefill(cache, [5, 6, 7, 8])
        steps = DraftedSteps(tiny, cache, execution, 4, 8)
        rows.clear()
        for _ in range(2):
            steps.take_turn()
            assert 3 + 9 <= cache.length <= 3 + 9 * 5, "three tokens, and nine steps behind them"
        assert set(rows) == {5} and len(rows) == 2 * 9 * (1 + (execution == "eager"))
    assert len(steps.seconds) == 2 and bool(steps.parts) == (execution == "eager")


def test_a_batchs_turn_is_taken_back_and_of_its_size(tiny):
    rows, prompt = [], [5, 6, 7, 8]
    with bench_step.batch_of(tiny, prompt, 3, 4) as batch:
        tiny.model.register_forward_pre_hook(
            lambda module, args, given: rows.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        for nodes, execution, count in ((4, "eager", 15), (0, "eager", 3), (4, "static", 16)):
            steps = bench_step.BatchedSteps(tiny, batch, execution, nodes)
            rows.clear()
            steps.take_turn()
            assert rows[-9:] == [count] * 9 and steps.seconds[0] > 0
            assert [member.sequence.text for member in batch.members] == [prompt] * 3
            owned = batch.cache.owners >= 0
            assert owned.sum() == 3 * 3 and {*batch.cache.positions[owned]} == {0, 1, 2}


def test_hf_goes_past_an_end_of_sequence(tiny):
    prompt = torch.tensor([[5, 6, 7]])
    tiny.model.generation_config.eos_token_id = None
    said = tiny.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    tiny.model.generation_config.eos_token_id = said[0, 4:].tolist()
    steps = HfSteps(LoadedModel(None, tiny, None, "raw", frozenset()), [5, 6, 7])
    steps.take_turn()
    assert steps.seconds[0] > 0


def test_first_contact_says_what_was_found_and_expected(call, tmp_path, monkeypatch):
    """On a CPU: the same steps, not captured. A check that fails says so, and the next ones go on."""
    monkeypatch.setattr(first_contact, "OUTPUT", tmp_path / "found.json")
    monkeypatch.setattr(first_contact, "CONTEXTS", (40, 50))
    monkeypatch.setattr(first_contact.Contact, "hf", lambda contact: 1 / 0)
    outcome = call(first_contact.main, "--shape", "tiny", "model.device=cpu", "model.context=400")
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "found.json").read_text())
    for name, expected in first_contact.EXPECTED.items():
        assert f"{name}: {str(found[name])[:2]}" in outcome.out and f"expected: {expected}" in outcome.out
    assert found["trial"]["name"] == "eager" and found["drop"] == [0, 0] and found["threads"] == [True, True]
    assert found["hf"] == "FAILED: ZeroDivisionError: division by zero"
    assert len(found["steps"]) == 2 * 3 * 2 and all(ms > 0 for ms in found["steps"].values())
    assert len(found["profile"]["longest"]) == 10 and found["profile"]["kernels"] > 100
    assert len(found["setup"]) == 4 and found["memory"]["weights_bytes"] > 1e5
