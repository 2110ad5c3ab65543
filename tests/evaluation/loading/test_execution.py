"""execution=auto on CUDA, told by stand-ins: captured steps where they give eager logits and text, and why not."""

from types import SimpleNamespace

import pytest
import torch

from evaluation.loading.execution import choose_execution
from evaluation.loading.models import LoadedModel
from evaluation.loading.settings import ModelSettings
from evaluation.statistics.notes import executed
from model import tuning
from model.engine import Target, generate
from model.engine.static_step import PaddedForward, WholeStep
from model.engine.verification import Commit
from model.errors import UserError
from model.recycling import TokenRecycling, build_template
from model.tuning import Execution, trial, tried
from tests.conftest import greedy, toy_model

V = 61
AGREED = "a trial gave eager steps' logits and text"


@pytest.fixture
def loaded(monkeypatch):
    """A target that calls itself a GPU's, whose captured steps are static ones."""
    target = Target(toy_model("llama-grouped"))
    monkeypatch.setattr(tuning, "CAPTURED", "static")
    return LoadedModel(ModelSettings("toy", ""), target, None, "chat", frozenset())


def test_captured_steps_are_taken_and_decode(loaded):
    found = tried(loaded.target)
    assert found == Execution("static", AGREED)
    drafter = TokenRecycling(V, build_template("best", nodes=9))
    out = generate(loaded.target, drafter, [5, 6, 7], max_new_tokens=30, execution=found.name)
    assert out.tokens == greedy(loaded.target.model, [5, 6, 7], 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_logits_are_refused(dtype, monkeypatch):
    """A kernel that attends to one column too few runs without an error: only its logits tell."""
    monkeypatch.setattr(tuning, "CAPTURED", "static")
    target = Target(toy_model("llama-grouped", dtype=dtype))
    assert trial(target) == ""
    original = PaddedForward.feed
    monkeypatch.setattr(PaddedForward, "feed", lambda step, draft, length: original(step, draft, length - 1))
    found = tried(target)
    assert found.name == "eager"
    assert "of the greatest away from eager ones" in found.why


def test_small_errors_of_short_types_are_seen(monkeypatch):
    """Of one row alone, and less than a twentieth of its greatest logit: more than rounding makes of it."""
    monkeypatch.setattr(tuning, "CAPTURED", "static")
    target = Target(toy_model("llama-grouped", dtype=torch.float16))
    run = PaddedForward.run

    def slightly(step):
        run(step)
        step.logits = step.logits.clone()
        step.logits[5, 7] += 0.04 * step.logits[5].abs().max()

    assert trial(target) == ""
    monkeypatch.setattr(PaddedForward, "run", slightly)
    assert "of the greatest away from eager ones" in trial(target)


def test_nan_is_wrong(loaded, monkeypatch):
    def filled(step):
        step.logits = torch.full((13, V), float("nan"))

    monkeypatch.setattr(PaddedForward, "run", filled)
    assert "nan of the greatest" in trial(loaded.target)


def test_a_whole_step_that_fails_is_passed_over(loaded, monkeypatch):
    """The forward is right, and what a drafter does on the device is not possible there."""

    def refused(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(WholeStep, "run", refused)
    assert "RuntimeError: operation not permitted" in trial(loaded.target)


def test_a_step_that_is_put_together_wrongly_is_passed_over(loaded, monkeypatch):
    """Right logits, and no error: only the text tells."""
    settle = Commit.__call__
    monkeypatch.setattr(Commit, "__call__", lambda own, tokens, choices: settle(own, tokens, choices.roll(1)))
    found = tried(loaded.target)
    assert found.name == "eager" and ", eager decoding's " in found.why


def test_a_tie_may_fall_either_way(loaded, monkeypatch):
    monkeypatch.setattr(tuning, "_tie", lambda target, prompt: 10.0)  # twenty times the greatest logit is no gap at all
    settle = Commit.__call__
    monkeypatch.setattr(Commit, "__call__", lambda own, tokens, choices: settle(own, tokens, choices.roll(1)))
    assert trial(loaded.target) == ""


def test_auto_is_tried_once_a_model_and_only_on_cuda(loaded, monkeypatch):
    assert choose_execution("auto", loaded) == Execution("eager"), "this target is on the CPU"
    asked = []
    monkeypatch.setattr(tuning, "tried", lambda target: asked.append(target) or Execution("static", "why"))
    monkeypatch.setattr(loaded.target, "device", torch.device("cuda", 0))
    for _ in range(3):
        assert choose_execution("auto", loaded) == Execution("static", "why")
    assert asked == [loaded.target]
    assert choose_execution("auto", loaded, timed=False) == Execution("eager")
    assert choose_execution("eager", loaded) == Execution("eager") and len(asked) == 1


def test_what_auto_took_stands_below_the_table():
    def run(**metadata):
        return SimpleNamespace(metadata=metadata)

    runs = [run(execution_used="eager", execution_why="graph failed its trial: no memory")] * 2 + [
        run(execution_used="eager")
    ]
    assert executed(runs) == ["execution=auto chose eager: graph failed its trial: no memory"]
    (line,) = executed([run(cudnn_attention=False), run()])
    assert line.startswith("cuDNN's attention is off, for hf as well")


@pytest.fixture
def refused(loaded, monkeypatch):
    """Captures raise; `asked` says what was asked of the device then, and what that does is the test's."""

    def run(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    loaded.target.asked = []
    monkeypatch.setattr(WholeStep, "run", run)
    monkeypatch.setattr(tuning, "synchronize", lambda device: loaded.target.asked.append("wait"), raising=False)
    return loaded


def test_after_a_trial_that_raised_the_device_is_asked_whether_it_still_works(refused, monkeypatch):
    asked = refused.target.asked
    monkeypatch.setattr(tuning, "give_back", lambda device: asked.append("give back"), raising=False)
    assert tried(refused.target).name == "eager" and asked == ["wait", "give back"]


def test_a_trial_that_left_the_device_unusable_stops_the_run(refused, monkeypatch):
    def poisoned(device):
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED\nand much more")

    monkeypatch.setattr(tuning, "give_back", poisoned, raising=False)
    with pytest.raises(UserError, match=r"not permitted.*captures_underway.*restart with execution=eager") as told:
        tried(refused.target)
    assert "\n" not in str(told.value)
