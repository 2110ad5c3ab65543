"""The host's part of captured steps, on a CPU: what is captured, replayed, shared, bounded and dropped."""

import pytest
import torch

from model.engine import Target, decode, generate
from model.engine.loop import exhaust
from model.engine.static_step import StaticStep
from model.methods import make_method
from model.methods.suffix import SuffixRecycling
from model.recycling import TokenRecycling, build_template
from tests.conftest import greedy, toy_model
from tests.model.engine.fake_graphs import FakeGraphs
from tests.model.every_method import V, make
from tests.model.methods.heads import write_eagle


@pytest.mark.parametrize("method", ["recycling", "dynamic"])
def test_steps_are_captured_once_and_replayed_from_then(monkeypatch, method):
    """That they are eager ones is in test_contract."""
    graphs = FakeGraphs(monkeypatch)
    target = graphs.target(toy_model("llama"))
    drafter = make(method, target, {})
    answers = [
        generate(target, drafter, [5, 6, i], max_new_tokens=70, execution="graph")
        for i in (7, 8, 9)
    ]
    assert (
        len(graphs.captured) == sum(len(steps._steps) for steps in drafter.executors.values()) <= 4
    )
    # all but the prompts' own
    assert graphs.replays == sum(answer.forwards - 1 for answer in answers)


def test_warm_ups_change_nothing(monkeypatch):
    """A second one that began where the first one ended would write behind the cache at a context's end."""
    graphs = FakeGraphs(monkeypatch)
    drafter = TokenRecycling(V, build_template("2.2.2"))
    seen = []
    run = StaticStep.run

    def noted(step):
        seen.append((int(step.length), int(drafter.state_dict()["candidates"].sum())))
        run(step)

    monkeypatch.setattr(StaticStep, "run", noted)
    generate(
        graphs.target(toy_model("llama")), drafter, [5, 6, 7], max_new_tokens=9, execution="graph"
    )
    assert len(graphs.captured) == 1 and seen[0] == seen[1] == seen[2] != seen[3]


def test_a_changed_mode_is_captured_anew(monkeypatch, tmp_path):
    """A replay knows nothing of an owner's new hook. The engine's own, for hidden states, changes nothing."""
    graphs = FakeGraphs(monkeypatch)
    captured = []
    target = graphs.target(toy_model("llama"))
    drafter = make("eagle", target, {"eagle": {"head_path": write_eagle(tmp_path, target.model)}})
    for change in (None, None, target.model.model.register_forward_hook):
        if change is not None:
            change(lambda module, inputs, output: None)
        generate(target, drafter, [5, 6, 7], max_new_tokens=9, execution="graph")
        captured.append(len(graphs.captured))
    assert captured[0] == captured[1] < captured[2] == 2 * captured[0]


@pytest.mark.parametrize("method", ["recycling", "dynamic"])
def test_a_captured_step_is_of_its_autocast(monkeypatch, method):
    """As a replay has the autocast of its capture; an answer's steps may differ in it, too."""
    model = toy_model("llama-grouped")
    target = FakeGraphs(monkeypatch).target(model)
    drafter = make(method, target, {})
    settings = dict(max_new_tokens=30, execution="graph")
    steps = decode(target, drafter.session(), [5, 6, 7], **settings)
    with torch.autocast("cpu", torch.bfloat16):
        half = generate(target, drafter, [5, 6, 7], **settings).tokens
        first = next(steps)
        assert first.tokens == half[: len(first.tokens)]
    prompts = [[i, 6, 7, i, 6, 7, 9] for i in range(10, 16)]
    assert len(exhaust(steps).tokens) == 30
    for prompt in prompts:
        assert generate(target, drafter, prompt, **settings).tokens == greedy(model, prompt, 30)


def test_two_sources_of_one_tree_are_two_captured_steps(monkeypatch):
    """Chains of one length are one tree: a copied chain must not replay the recycled one's step."""
    model = toy_model("llama")
    prompt = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
    settings = dict(min_match=2, max_draft=4, k=2)

    def make():
        return SuffixRecycling(V, build_template("chain", depth=4, k=2), **settings)

    eager = generate(Target(model), make(), prompt, max_new_tokens=60)
    assert {step.source for step in eager.steps} == {"suffix", "recycling"}
    graphs, drafter = FakeGraphs(monkeypatch), make()
    captured = generate(graphs.target(model), drafter, prompt, max_new_tokens=60, execution="graph")
    assert captured.steps == eager.steps
    assert len(graphs.captured) == 2


def test_plain_steps_are_never_dropped(monkeypatch):
    """Sizes are many, and each probe of nodes=auto needs the plain step, which is captured first."""
    monkeypatch.setattr("model.engine.step.MAX_STEPS", 1)
    graphs = FakeGraphs(monkeypatch)
    target = graphs.target(toy_model("llama"))
    drafter = make_method("dynamic", target)
    generate(target, drafter, [5, 6, 7], max_new_tokens=40, execution="graph")
    assert len(graphs.captured) > 1 and graphs.captured[0]() is not None
