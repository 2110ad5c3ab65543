"""The step bench as a command, and what a step must cost at least."""

import json

import pytest

from evaluation import bench_step
from evaluation.loading.models import random_model
from evaluation.loading.settings import ModelSettings
from evaluation.timing.floor import Rates, step_cost


def test_the_step_bench_ends_in_one_json_object(call, checkpoint):
    outcome = call(bench_step.main, "--model-path", checkpoint, "--prompts", 2, "--repeats", 1, "--max-new-tokens", 8)
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out.splitlines()[-1])
    for name in ("vanilla", "recycling"):
        phases = result[name]["phases_us"]
        assert set(phases) == {"draft", "forward", "verify", "commit", "observe", "loop"}
        assert result[name]["step_us"] == pytest.approx(sum(phases.values()))
        assert result[name]["bytes"] > 0 and result[name]["flop"] > 0 and result[name]["floor_us"] > 0
        assert result[name]["outside_forward"] == pytest.approx(1 - phases["forward"] / sum(phases.values()))
    assert {"vanilla", "pld", "recycling", "lookahead"} <= set(result["drafting_us"])
    assert all(us > 0 for cost in result["drafting_us"].values() for us in cost.values())
    assert "rest               not measured: " in outcome.out, "the shipped datastore is of another vocabulary"


def test_the_step_bench_takes_a_shape_and_compares(call, every_kind, tmp_path):
    base = ["--shape", "tiny", "--context", 40, "--repeats", 1, "--max-new-tokens", 8, "--tree", "best:12"]
    saved = tmp_path / "first.json"
    assert call(bench_step.main, *base, "--save", saved, "--mat", 2.7, "--draw", tmp_path / "roof").code == 0
    assert {path.suffix for path in tmp_path.glob("roof.*")} == {".png", ".svg", ".pdf"}
    outcome = call(bench_step.main, *base, "--against", saved, "--execution", "static", "--attention", "tree")
    assert outcome.code == 0, outcome.err
    assert "against the earlier run" in outcome.out and outcome.out.count(" -> ") == 2
    first = json.loads(saved.read_text())
    assert first["tokens_per_second_at_mat"] == pytest.approx(2.7e6 / first["recycling"]["step_us"])
    assert "not a saved run" in call(bench_step.main, *base, "--against", __file__).err
    assert "--shape huge: unknown" in call(bench_step.main, "--shape", "huge").err


def test_the_floor_by_hand():
    loaded = random_model("tiny", ModelSettings("x", "x"))
    loaded.target.reserve(8)
    layer = 4 * 64 * 64 + 3 * 64 * 128
    cost = step_cost(loaded.target, nodes=5, context=100)
    cache = 2 * 2 * 64 * 4 * 105  # keys and values, two layers, 64 wide, float32
    assert cost.bytes == 4 * (2 * layer + 2 * 64 * 2 + 64 + 256 * 64) + cache  # norms, and the head but no embedding
    assert cost.flop == 2 * 5 * (2 * layer + 256 * 64) + 4 * 5 * 105 * 64 * 2
    assert cost.floor_seconds(Rates(1e9, 1e9)) == max(cost.bytes, cost.flop) / 1e9
