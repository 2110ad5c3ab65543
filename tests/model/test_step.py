"""The static step: the same outcome as the eager one, step by step, with nothing read from the host but its report."""

import random

import pytest
import torch

from model.auto import SIZES, AutoRecycling
from model.decoding import Target, decode
from model.decoding.step import BUCKET, EagerStep, StaticSteps, make_step
from model.errors import UserError
from model.pld import PromptLookup
from model.recycling import TokenRecycling, build_template
from model.vanilla import Vanilla
from tests.conftest import toy_model

V = 61
MAKE = {
    "vanilla": lambda: Vanilla(torch.device("cpu")),
    "recycling": lambda: TokenRecycling(V, build_template("2.2.2")),
    "chain": lambda: TokenRecycling(V, build_template("chain", depth=3, k=2), k=2, dtype=torch.int32),
    "auto": lambda: AutoRecycling(V, step_seconds={n: 1 + n / 30 for n in SIZES}),
    "pld": PromptLookup,
}


def outcomes(target, drafter, seed, prompts=3):
    """Tokens, accepted lengths and paths over some prompts; and what the drafter then carries."""
    rng, outs = random.Random(seed), []
    for i in range(prompts):
        prompt = [rng.randrange(3, V) for _ in range(4 + 30 * i)]
        out = decode(target, drafter, prompt, max_new_tokens=70, eos={rng.randrange(V)})
        outs.append((out.tokens, [(s.accepted, s.nodes, s.rank_path) for s in out.steps], out.forwards, out.stop))
    return outs, {name: tensor.tolist() for name, tensor in drafter.state_dict().items()}


@pytest.mark.parametrize("name", ["llama", "llama-grouped", "gpt2", "gpt-neox", "gemma"])
@pytest.mark.parametrize("method", MAKE)
def test_static_equals_eager_step_by_step(name, method):
    model = toy_model(name)
    eager = outcomes(Target(model), MAKE[method](), seed=1)
    static = outcomes(Target(model, execution="static"), MAKE[method](), seed=1)
    assert static == eager


@pytest.mark.parametrize("name", ["llama", "llama-grouped", "qwen3", "gpt-neox"])
@pytest.mark.parametrize("method", ["vanilla", "recycling", "auto"])
def test_tree_attention_equals_sdpa_step_by_step(name, method):
    eager = outcomes(Target(toy_model(name)), MAKE[method](), seed=1)
    target = Target(toy_model(name), execution="static", tree_attention=True)
    assert outcomes(target, MAKE[method](), seed=1) == eager


def test_tree_attention_is_for_static_steps():
    with pytest.raises(UserError, match=r"model.attention=tree.*execution=static"):
        Target(toy_model("llama"), tree_attention=True)


def test_static_crosses_buckets_and_ends_at_the_context():
    model = toy_model("llama")
    outs = []
    for execution in ("eager", "static"):
        target = Target(model, execution=execution)
        drafter = TokenRecycling(V, build_template("best", nodes=40))
        outs.append(decode(target, drafter, [5, 6, 7], max_new_tokens=400))
    assert outs[0].tokens == outs[1].tokens and outs[0].accept_lengths == outs[1].accept_lengths
    assert outs[1].stop == "context" and len(outs[1].tokens) == 253
    assert {bucket for _, bucket in drafter.static_steps._made} == {BUCKET, 256 + 41}


def test_a_changing_topology_falls_back_to_eager():
    target = Target(toy_model("llama"), execution="static")
    target.reserve(90)
    mark = print
    assert isinstance(make_step(target, PromptLookup(), mark), EagerStep)
    assert isinstance(make_step(target, MAKE["recycling"](), mark), StaticSteps)
    assert isinstance(make_step(Target(toy_model("llama")), MAKE["recycling"](), mark), EagerStep)


def test_steps_are_made_once_and_anew_for_another_cache():
    target, drafter = Target(toy_model("llama"), execution="static"), MAKE["recycling"]()
    target.reserve(81)
    first = make_step(target, drafter, print)
    assert make_step(target, drafter, print) is first
    target.reserve(200)
    assert make_step(target, drafter, print) is not first


def test_unknown_or_impossible_execution_is_refused():
    with pytest.raises(UserError, match="execution=magic: there is auto, eager, static"):
        Target(toy_model("llama"), execution="magic")
    with pytest.raises(UserError, match="execution=graph: needs a CUDA device"):
        Target(toy_model("llama"), execution="graph")
