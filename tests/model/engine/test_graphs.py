"""The host's part of captured steps, on a CPU: what is captured, replayed, shared, bounded and dropped."""

import copy
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.devices import RefusesHostReads, give_back
from model.engine import Target, decode, exhaust, generate
from model.engine.graphs.static_step import StaticStep
from model.errors import UserError
from model.methods import make_method
from model.methods.copying.suffix import SuffixRecycling
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from model.tuning import trial
from tests.conftest import CONFIGS, greedy, toy_model
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
        generate(target, drafter, [5, 6, i], max_new_tokens=24, execution="graph") for i in (7, 8)
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
        seen.append((step.length.clone(), drafter.state_dict()["candidates"].sum()))
        run(step)

    monkeypatch.setattr(StaticStep, "run", noted)
    generate(
        graphs.target(toy_model("llama")), drafter, [5, 6, 7], max_new_tokens=9, execution="graph"
    )
    assert len(graphs.captured) == 1 and seen[0] == seen[1] == seen[2] == seen[3] != seen[4]


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


def test_a_captured_step_is_of_its_autocast(monkeypatch):
    """As a replay has the autocast of its capture; an answer's steps may differ in it, too."""
    model = toy_model("llama-grouped")
    target = FakeGraphs(monkeypatch).target(model)
    drafter = make("recycling", target, {})
    settings = dict(max_new_tokens=20, execution="graph")
    steps = decode(target, drafter.session(), [5, 6, 7], **settings)
    with torch.autocast("cpu", torch.bfloat16):
        half = generate(target, drafter, [5, 6, 7], **settings).tokens
        first = next(steps)
        assert first.tokens == half[: len(first.tokens)]
    assert len(exhaust(steps).tokens) == 20
    for prompt in ([i, 6, 7, i, 6, 7, 9] for i in range(10, 14)):
        assert generate(target, drafter, prompt, **settings).tokens == greedy(model, prompt, 20)


def test_two_sources_of_one_tree_are_two_captured_steps(monkeypatch):
    """Chains of one length are one tree: a copied chain must not replay the recycled one's step."""
    model = toy_model("llama")
    prompt = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
    settings = dict(min_match=2, max_draft=4, k=2)

    def make():
        return SuffixRecycling(V, build_template("chain", depth=4, k=2), **settings)

    eager = generate(Target(model), make(), prompt, max_new_tokens=40)
    assert {step.source for step in eager.steps} == {"suffix", "recycling"}
    graphs = FakeGraphs(monkeypatch)
    drafter = make()
    captured = generate(graphs.target(model), drafter, prompt, max_new_tokens=40, execution="graph")
    assert captured.steps == eager.steps
    assert len(graphs.captured) == 2


def test_a_capture_that_fails_leaves_the_thread_on_its_stream(monkeypatch):
    """Torch's own `graph` raises as it ends a broken capture, before it sets the outer stream again."""
    graphs = FakeGraphs(monkeypatch)
    before = graphs.stream
    target = graphs.target(toy_model("llama"))
    end = torch.cuda.CUDAGraph.capture_end

    def broken(graph):
        end(graph)
        raise RuntimeError("operation failed due to a previous error during capture")

    def run():
        torch.cuda.CUDAGraph.capture_end = broken

    with pytest.raises(RuntimeError, match="previous error"):
        target.graphs.capture(run, lambda: None)
    assert graphs.stream is before


def test_memory_is_given_back_outside_of_captures(monkeypatch):
    """Of any thread and target: freeing memory breaks a capture."""
    target = FakeGraphs(monkeypatch).target(toy_model("llama"))
    freed = []
    other = threading.Thread(target=give_back, args=[torch.device("cuda", 0)])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))

    def run():
        freed.clear()  # torch frees memory before a capture, too
        other.start()
        other.join(0.2)
        assert not freed

    target.graphs.capture(run, lambda: None)
    other.join()
    assert freed


def test_a_model_that_reads_a_value_on_the_host_is_not_captured(monkeypatch):
    """Its capture would break half-way, which before torch 2.12 leaves the device unusable."""
    graphs = FakeGraphs(monkeypatch)
    config = copy.deepcopy(CONFIGS["llama"])
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    target = graphs.target(AutoModelForCausalLM.from_config(config).eval())
    why = "a step of this model calls aten._local_scalar_dense.default, which waits for the host"
    with pytest.raises(UserError, match=why):
        generate(target, Vanilla("cpu"), [5, 6, 7], max_new_tokens=9, execution="graph")
    chosen = trial(target)
    assert chosen.name == "eager" and why in chosen.why
    assert not graphs.captured


WAITS = [
    lambda x: bool(x[0] > 0),
    lambda x: x[x > 1],
    lambda x: x.unique(),
    lambda x: x.to("meta"),
    lambda x: torch.ones(4, device="meta").copy_(x),
]


def test_what_waits_for_the_host_is_refused():
    """In inference mode, where operators that consist of others arrive whole; meta stands for another device."""
    x = torch.arange(4.0)
    with torch.inference_mode(), RefusesHostReads():
        x[x.long()].half()
        torch.where(x > 1, x, 0.0).copy_(x)
        for call in WAITS:
            with pytest.raises(UserError, match="waits for the host"):
                call(x)


def test_plain_steps_are_never_dropped(monkeypatch):
    """Sizes are many, and each probe of nodes=auto needs the plain step, which is captured first."""
    monkeypatch.setattr("model.engine.loop.step.MAX_STEPS", 1)
    graphs = FakeGraphs(monkeypatch)
    target = graphs.target(toy_model("llama"))
    drafter = make_method("dynamic", target)
    generate(target, drafter, [5, 6, 7], max_new_tokens=40, execution="graph")
    assert len(graphs.captured) > 1 and graphs.captured[0]() is not None
