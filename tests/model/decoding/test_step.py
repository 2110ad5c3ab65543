"""The static step: the same outcome as the eager one, step by step, with nothing read from the host but its report."""

import random
import time
from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from model.copying.goose import Goose
from model.copying.logitspec import LogitSpec
from model.copying.pld import PromptLookup
from model.copying.racer import Racer
from model.decoding import Target, generate
from model.decoding.static_step import BUCKET, ROWS
from model.decoding.step import DeviceStep, Executor, HostStep, Sequence, make_step
from model.dynamic.dynamic_recycling import DynamicRecycling
from model.errors import UserError
from model.recycling import TokenRecycling, build_template
from model.vanilla import Vanilla
from tests.conftest import toy_model
from tests.model.sessions import comparable

V = 61
MAKE = {
    "vanilla": lambda: Vanilla(torch.device("cpu")),
    "recycling": lambda: TokenRecycling(V, build_template("2.2.2")),
    "chain": lambda: TokenRecycling(V, build_template("chain", depth=3, k=2), k=2, dtype=torch.int32),
    "pld": PromptLookup,
    "goose": lambda: Goose(V, nodes=20),
    "logitspec": lambda: LogitSpec(V, nodes=20),
    "racer": lambda: Racer(V, nodes=20, trie_nodes=200),
    "dynamic": lambda: DynamicRecycling(V, nodes=10, k=4, pairs=64),
}


def outcomes(target, drafter, seed, prompts=3, limit=70):
    """Tokens, accepted lengths and paths over some prompts; and what the drafter then carries."""
    rng, outs = random.Random(seed), []
    for i in range(prompts):
        prompt = [rng.randrange(3, V) for _ in range(4 + 30 * i)]
        out = generate(target, drafter, prompt, max_new_tokens=limit, eos={rng.randrange(V)})
        outs.append((out.tokens, [(s.accepted, s.nodes, s.rank_path) for s in out.steps], out.forwards, out.stop))
    return outs, comparable(drafter.state_dict())


@pytest.mark.parametrize("name", ["llama", "llama-grouped", "qwen3", "gpt2", "gpt-neox", "gemma", "olmo2"])
@pytest.mark.parametrize("method", MAKE)
def test_static_equals_eager_step_by_step(name, method):
    model = toy_model(name)
    eager = outcomes(Target(model), MAKE[method](), seed=1)
    static = outcomes(Target(model, execution="static"), MAKE[method](), seed=1)
    assert static == eager


@pytest.mark.parametrize("name", ["llama", "llama-grouped", "qwen3", "gpt2", "gpt-neox", "gemma", "olmo2"])
@pytest.mark.parametrize("method", ["vanilla", "recycling", "pld", "dynamic"])
def test_tree_attention_equals_sdpa_step_by_step(name, method):
    eager = outcomes(Target(toy_model(name)), MAKE[method](), seed=1)
    target = Target(toy_model(name), execution="static", tree_attention=True)
    assert outcomes(target, MAKE[method](), seed=1) == eager


@pytest.fixture
def traced(monkeypatch):
    """torch.compile traces, guards and compiles anew as always, but generates no code, which takes seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


@cache
def long_answers() -> tuple[Any, list[Any], list[Any]]:
    """A narrow model of long context, drafters of three trees, and what eager decoding with each gives."""
    torch.manual_seed(0)
    config = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=V, max_position_embeddings=2600, **config)).eval()
    drafters = [MAKE["vanilla"], *(partial(TokenRecycling, V, build_template("best", nodes=n)) for n in (4, 40))]
    return model, drafters, [outcomes(Target(model), make(), seed=1, limit=2400, prompts=1) for make in drafters]


@pytest.mark.slow
@pytest.mark.parametrize("tree_attention", [False, True])
def test_few_compilations_serve_all_trees_and_buckets(traced, tree_attention):
    """Compiling for each would reach torch's limit at the eighth, and from there on nothing would be compiled."""
    model, drafters, eager = long_answers()
    target = Target(model, execution="compiled", tree_attention=tree_attention)
    for make, expected in zip(drafters, eager, strict=True):
        assert outcomes(target, make(), seed=1, limit=2400, prompts=1) == expected
    assert traced["unique_graphs"] <= 5
    assert torch._dynamo.config.recompile_limit == 8, "the process's own switches are as they were"


@pytest.mark.parametrize("tree_attention", [False, True])
def test_two_compilations_serve_all_rows_buckets_and_capacities(traced, tree_attention):
    """One for a row alone, one for all others; a trial's or another method's cache has another capacity."""
    model = long_answers()[0]
    model.set_attn_implementation("sdpa")  # which another test's tree attention took the place of
    target = Target(model, execution="compiled", tree_attention=tree_attention)
    makes = [partial(TokenRecycling, V, build_template("best", nodes=n)) for n in (12, 80, 4)]
    makes += [MAKE["vanilla"], MAKE["dynamic"]]
    for make in makes:
        for length in (5, 300):
            generate(target, make(), [3 + i % 50 for i in range(length)], max_new_tokens=4)
    assert traced["unique_graphs"] == 2


def test_what_cannot_be_compiled_is_told_in_one_line(monkeypatch):
    """On a machine without a C++ compiler, for one."""

    def broken(graph, inputs):
        raise RuntimeError("No working C++ compiler found\nand much more")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    torch._dynamo.reset()
    target = Target(toy_model("llama"), execution="compiled")
    with pytest.raises(UserError, match=r"execution=compiled.*No working C\+\+ compiler.*execution=eager") as told:
        generate(target, MAKE["vanilla"](), [5, 6, 7], max_new_tokens=5)
    assert "\n" not in str(told.value)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "method",
    ["recycling", "dynamic", *(pytest.param(m, marks=pytest.mark.slow) for m in ("chain",))],
)
def test_compiling_leaves_no_trace(traced, method):
    """A step is run to compile it, which must not teach the drafter anything."""
    model = toy_model("llama")
    eager = outcomes(Target(model), MAKE[method](), seed=2)
    assert outcomes(Target(model, execution="compiled"), MAKE[method](), seed=2) == eager
    assert traced["unique_graphs"] >= 1


@pytest.mark.parametrize("name", ["llama-grouped", "qwen3", "gemma", "gpt-neox", "gpt2", "olmo2"])
def test_traced_steps_equal_eager_ones_in_every_architecture(traced, name):
    model = toy_model(name)
    for method in ("recycling", "dynamic"):
        eager = outcomes(Target(model), MAKE[method](), seed=2, prompts=2, limit=40)
        assert outcomes(Target(model, execution="compiled"), MAKE[method](), seed=2, prompts=2, limit=40) == eager


def test_making_steps_is_not_decoding(monkeypatch):
    """Seconds spent on a new tree and bucket are set apart, and only the first prompt that needs them has any."""
    target, drafter = Target(toy_model("llama"), execution="compiled"), MAKE["recycling"]()
    calls = []

    def slow(self, step, length):
        time.sleep(0.3)
        calls.append(step.forward.bucket)
        return step.run

    monkeypatch.setattr(Executor, "_prepared", slow)
    monkeypatch.setattr(Target, "_compiled_model", property(lambda self: self._run_model))
    phases = []
    first = generate(target, drafter, [5, 6, 7], max_new_tokens=20, mark=phases.append)
    again = generate(target, drafter, [5, 6, 8], max_new_tokens=20)
    assert calls == [256] and phases.count("setup") == 1
    assert 0.3 <= first.setup_s < 5 and first.decode_s < 0.3 and again.setup_s == 0
    assert generate(Target(toy_model("llama")), MAKE["recycling"](), [5, 6, 7], max_new_tokens=20).setup_s == 0


def test_tree_attention_is_for_static_steps():
    with pytest.raises(UserError, match=r"model.attention=tree.*execution=static"):
        Target(toy_model("llama"), tree_attention=True)


def test_static_crosses_buckets_and_ends_at_the_context():
    model = toy_model("llama")
    outs = []
    for execution in ("eager", "static"):
        target = Target(model, execution=execution)
        drafter = TokenRecycling(V, build_template("best", nodes=40))
        outs.append(generate(target, drafter, [5, 6, 7], max_new_tokens=400))
    assert outs[0].tokens == outs[1].tokens and outs[0].accept_lengths == outs[1].accept_lengths
    assert outs[1].stop == "context" and len(outs[1].tokens) == 253
    (steps,) = drafter.executors.values()
    assert {key[-1] for key in steps._steps} == {
        BUCKET,
        256 + 48,
    }  # the cache holds a draft of 41 behind a full context, and a multiple of 16


def test_what_drafts_as_it_likes_is_fed_into_steps_of_a_few_sizes():
    target, drafter = Target(toy_model("llama"), execution="static"), MAKE["dynamic"]()
    with target.cache(90) as cache:
        assert isinstance(make_step(Sequence(target, cache, drafter.session(), [5])), HostStep)
        assert isinstance(make_step(Sequence(target, cache, MAKE["recycling"]().session(), [5])), DeviceStep)
        eager = Target(toy_model("llama"))
        for method in (drafter, MAKE["recycling"]()):
            assert isinstance(make_step(Sequence(eager, cache, method.session(), [5])), HostStep)
    drafted = {nodes for answer in outcomes(target, drafter, seed=1)[0] for _, nodes, _ in answer[1]}
    (steps,) = drafter.executors.values()
    rows = {rows for _, rows, _ in steps._steps}
    assert rows <= {*ROWS, drafter.max_nodes} and max(rows) <= drafter.max_nodes
    assert rows == {min(next(n for n in ROWS if n >= nodes), drafter.max_nodes) for nodes in drafted} and len(rows) > 2


def test_candidates_are_found_with_the_forward_that_a_draft_is_fed_into(monkeypatch):
    """Where a device does it without the host, and not once more behind it."""
    expected = outcomes(Target(toy_model("llama")), MAKE["dynamic"](), seed=4)
    monkeypatch.setattr("model.decoding.step.candidates_of", None)  # would fail if it were called
    assert outcomes(Target(toy_model("llama"), execution="static"), MAKE["dynamic"](), seed=4) == expected


def test_steps_are_made_once_and_anew_for_another_cache():
    target, drafter = Target(toy_model("llama"), execution="static"), MAKE["recycling"]()

    def steps(nodes):
        with target.cache(nodes) as cache:
            return make_step(Sequence(target, cache, drafter.session(), [5])).executor

    first = steps(81)
    assert steps(81) is first
    assert steps(200) is not first
    target.execution = "eager"
    target.execution = "compiled"
    assert steps(200).execution == "compiled"


def test_unknown_or_impossible_execution_is_refused():
    with pytest.raises(UserError, match="execution=magic: there is auto, eager, static"):
        Target(toy_model("llama"), execution="magic")
    with pytest.raises(UserError, match="execution=graph: needs a CUDA device"):
        Target(toy_model("llama"), execution="graph")
