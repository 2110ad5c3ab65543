"""The static step: the same outcome as the eager one, step by step, with nothing read from the host but its report."""

import time

import pytest

from model.engine import Sampling, Target, generate
from model.engine.graphs.static_step import BUCKET, StaticStep
from model.errors import UserError
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model

V = 61


def recycling():
    return TokenRecycling(V, build_template("2.2.2"))


def test_making_steps_is_not_decoding(monkeypatch):
    """Seconds spent on a new tree and bucket are set apart, and only the first prompt that needs them has any."""
    target = Target(toy_model("llama"))
    drafter = recycling()
    made = []
    init = StaticStep.__init__

    def slow(step, setup, *given):
        time.sleep(0.3)
        made.append(setup.bucket)
        init(step, setup, *given)

    monkeypatch.setattr(StaticStep, "__init__", slow)
    phases = []
    first = generate(
        target, drafter, [5, 6, 7], max_new_tokens=20, mark=phases.append, execution="static"
    )
    again = generate(target, drafter, [5, 6, 8], max_new_tokens=20, execution="static")
    assert len(made) == 1 and phases.count("setup") == 1
    assert 0.3 <= first.setup_s < 5 and again.setup_s == 0
    assert max(first.prefill_s, first.decode_s) < 0.3


@pytest.mark.parametrize("by_table", [True, False])
def test_static_crosses_buckets_and_ends_at_the_context(by_table):
    """Without masks there is one bucket: the cache."""
    model = toy_model("llama")
    outs = []
    for execution in ("eager", "static"):
        target = Target(model)
        target.attends_by_table = by_table
        drafter = TokenRecycling(V, build_template("best", nodes=40))
        outs.append(generate(target, drafter, [5, 6, 7], max_new_tokens=400, execution=execution))
    assert outs[0].tokens == outs[1].tokens and outs[0].accept_lengths == outs[1].accept_lengths
    assert outs[1].stop == "context" and len(outs[1].tokens) == 253
    (steps,) = drafter.executors.values()
    room = 256 + 48  # a draft of 41 behind a full context, and a multiple of 16
    assert {bucket for *_, bucket, _ in steps._steps} == ({room} if by_table else {BUCKET, room})


def test_unknown_or_impossible_execution_is_refused(llama):
    target = Target(llama)
    penalised = Sampling(repetition_penalty=1.1)
    for settings, why in (
        (dict(execution="magic"), "execution=magic: there is"),
        (dict(execution="graph"), "execution=graph: needs a CUDA device"),
        (dict(execution="static", sampling=penalised), "repetition penalty.*take execution=eager"),
    ):
        with pytest.raises(UserError, match=why):
            generate(target, Vanilla(target.device), [5], max_new_tokens=1, **settings)
