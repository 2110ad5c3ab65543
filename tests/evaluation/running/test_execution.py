"""execution=auto on CUDA, told by stand-ins: the first way that gives eager logits, and why others were not taken."""

from functools import partial

import pytest
import torch

from evaluation.running import execution
from evaluation.running.execution import Execution, choose_execution, trial, tried
from evaluation.running.model_settings import ModelSettings
from evaluation.running.models import LoadedModel
from evaluation.statistics.caveats import passed_over
from model.decoding import Target, generate
from model.decoding.settlement import Settlement
from model.decoding.static_step import FedStep, StaticStep
from model.recycling import TokenRecycling, build_template
from tests.conftest import greedy, toy_model

V = 61


@pytest.fixture
def loaded(monkeypatch):
    """A target that calls itself a GPU's, whose captured steps are static ones, and compiled ones traced alone."""
    target = Target(toy_model("llama-grouped"))
    monkeypatch.setattr(
        execution, "WAYS", (("compiled", True), ("compiled", False), ("static", True), ("static", False))
    )
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    return LoadedModel(ModelSettings("toy", ""), target, None, "chat", frozenset())


def test_the_fastest_way_is_taken_and_decodes(loaded):
    assert tried(loaded.target, "auto") == Execution("compiled", True)
    assert tried(loaded.target, "sdpa") == Execution("compiled", False)
    found = tried(loaded.target, "tree")
    assert found == Execution("compiled", True)
    found.take(loaded.target)
    assert loaded.target.execution == "compiled" and loaded.target.switch is not None
    out = generate(loaded.target, TokenRecycling(V, build_template("best", nodes=9)), [5, 6, 7], max_new_tokens=30)
    assert out.tokens == greedy(loaded.target.model, [5, 6, 7], 30)


def test_what_fails_is_passed_over_and_told(loaded, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no such\ninstruction")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    found = tried(loaded.target, "auto")
    assert (found.name, found.tree_attention) == ("static", True)
    first, second = found.passed_over.split("; compiled: ")
    assert first.startswith("compiled with the tree kernel: UserError: execution=compiled: torch.compile failed")
    assert "no such instruction" in first and "no such instruction" in second and "\n" not in found.passed_over


def test_wrong_logits_are_passed_over(loaded, monkeypatch):
    """A kernel that attends to one column too few runs without an error: only its logits tell."""
    original = FedStep.feed
    monkeypatch.setattr(FedStep, "feed", lambda step, draft, length: original(step, draft, length - 1))
    found = tried(loaded.target, "auto")
    assert found.name == "eager" and not found.tree_attention
    assert found.passed_over.count("of the greatest away from eager ones") == 4
    found.take(loaded.target)
    assert loaded.target.switch is None and loaded.target.execution == "eager"


def test_nan_is_wrong(loaded, monkeypatch):
    def filled(step):
        step.logits = torch.full((13, V), float("nan"))

    monkeypatch.setattr(FedStep, "run", filled)
    assert "nan of the greatest" in trial(loaded.target, "static", False)


def test_a_whole_step_that_fails_is_passed_over(loaded, monkeypatch):
    """The forward is right, and what a drafter does on the device is not possible there."""

    def refused(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StaticStep, "run", refused)
    assert "RuntimeError: operation not permitted" in trial(loaded.target, "static", False)


def test_a_step_that_is_put_together_wrongly_is_passed_over(loaded, monkeypatch):
    """Right logits, and no error: only the text tells."""
    settle = Settlement.__call__
    monkeypatch.setattr(Settlement, "__call__", lambda own, tokens, choices: settle(own, tokens, choices.roll(1)))
    found = tried(loaded.target, "auto")
    assert found.name == "eager" and found.passed_over.count(", eager decoding's ") == 4


def test_a_tie_may_fall_either_way(loaded, monkeypatch):
    monkeypatch.setattr(execution, "_tie", lambda target: 10.0)  # twenty times the greatest logit is no gap at all
    settle = Settlement.__call__
    monkeypatch.setattr(Settlement, "__call__", lambda own, tokens, choices: settle(own, tokens, choices.roll(1)))
    assert trial(loaded.target, "static", False) == ""


def test_auto_is_tried_once_a_model_and_only_on_cuda(loaded, monkeypatch):
    assert choose_execution("auto", loaded) == Execution("eager", False), "this target is on the CPU"
    asked = []
    monkeypatch.setattr(execution, "tried", lambda target, own: asked.append(own) or Execution("static", False, "why"))
    monkeypatch.setattr(loaded.target, "device", torch.device("cuda", 0))
    for _ in range(3):
        assert choose_execution("auto", loaded) == Execution("static", False, "why")
    assert asked == ["auto"]
    assert choose_execution("auto", loaded, timed=False) == Execution("eager", False)
    assert choose_execution("eager", loaded) == Execution("eager", False) and asked == ["auto"]


def test_what_was_passed_over_stands_below_the_table():
    class Run:
        def __init__(self, summary=None, **metadata):
            self.metadata, self.summary, self.complete = metadata, summary, summary is not None

    runs = [Run(execution_used="graph", execution_passed_over="compiled: no compiler")] * 2 + [
        Run(execution_used="eager")
    ]
    assert passed_over(runs) == ["execution=auto took graph; passed over: compiled: no compiler"]
