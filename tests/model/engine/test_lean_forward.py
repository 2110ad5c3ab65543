"""A forward as one loop: the model's own numbers, where the trial finds them, and nowhere else."""

import copy
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from evaluation.configuration.jobs import group_settings
from evaluation.loading.models import ModelSettings, locate
from model.devices import torch_threads
from model.engine import LAST, Draft, Request, Target, Tree, decode, generate
from model.engine.attention.layers import mode_of
from model.engine.loop.batch import decode_batch
from model.engine.target import lean_forward, lean_loops
from model.methods import make_method
from model.weights.linear import Layouts
from model.weights.narrow_weights import keep_narrow
from tests.conftest import CONFIGS, greedy, sharpened, toy_model

SERVED = ("llama", "llama-grouped", "qwen2", "qwen3", "mistral", "smollm3")
PROMPT = [5, 9, 13, 7, 5, 9, 13, 8, 20, 21]
measure = (
    lean_forward.LeanForward._measure
)  # the fixture of all tests puts fixed times in its place


def tree_of(rows):
    return Tree([0, *((node - 1) // 2 for node in range(1, rows))])


def lean_target(model):
    return Target(model, linear=Layouts(("torch",), auto=True))


def outputs(target, rows, lean, poison=0, hidden=(0, 1, LAST)):
    """Logits and hidden states after a prompt; what the cache does not use holds NaNs."""
    limit = target.lean.limit
    target.lean.limit = limit if lean else 0
    with target.cache(rows, tokens=64) as cache, torch.inference_mode():
        for buffer in cache._buffers:
            buffer.fill_(torch.nan)
        target.prefill(cache, PROMPT)
        tokens = torch.arange(rows) * 5 % 61
        out = target.forward(cache, Draft(tree_of(rows), tokens), hidden=hidden)
    target.lean.limit = limit
    return out


@pytest.mark.parametrize(
    ("kind", "weights", "threads"),
    [
        ("llama", torch.float32, 1),
        ("llama-grouped", torch.float16, 3),
        ("qwen2", torch.bfloat16, 1),
        ("qwen3", torch.float32, 1),
        ("mistral", torch.float16, 1),
        ("smollm3", torch.bfloat16, 1),
    ],
)
def test_numbers_are_the_models_own(kind, weights, threads):
    """Of weights of each type, by one thread or a team; with hidden states, biases and norms that count."""
    model = toy_model(kind)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(weights).float()
        if parameter.dim() == 1:  # norms and biases
            parameter.data = torch.rand_like(parameter) + 0.5
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.01
    with torch_threads(threads):
        layouts = Layouts(("torch" if weights is torch.float32 else "half",), auto=True)
        target = Target(model, linear=layouts)
        assert str(target.lean) == "one loop for up to 24 rows"
        assert target.lean._like.dtype == lean_forward.BITS[weights]
        for rows in (1, 2, 5, 24):
            for ours, own in zip(
                outputs(target, rows, True), outputs(target, rows, False), strict=True
            ):
                assert not torch.equal(ours, own), "nothing was compared"
                torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4 * float(own.abs().max()))


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - set(SERVED)))
def test_other_models_are_their_own(kind):
    lean = lean_target(toy_model(kind)).lean
    assert str(lean) == "the model's (other parts)" and not lean.limit


def test_layers_of_two_types_without_rotation_in_one():
    config = copy.deepcopy(CONFIGS["smollm3"])
    config.no_rope_layers = [1, 0]
    config.layer_types = ["sliding_attention", "full_attention"]
    config.sliding_window = 6
    target = lean_target(sharpened(AutoModelForCausalLM.from_config(config).eval()))
    assert str(target.lean) == "one loop for up to 24 rows"
    for rows in (1, 5):
        pairs = zip(outputs(target, rows, True), outputs(target, rows, False), strict=True)
        for ours, own in pairs:
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4 * float(own.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16])
def test_a_real_model_passes_the_trial(weights):
    """SmolLM2: 30 layers round more than a toy's. Weights of 16 bits are kept as such."""
    settings = ModelSettings(**group_settings(["model=smollm2-135m"], "model")["model"])
    model = AutoModelForCausalLM.from_pretrained(locate(settings), dtype=weights)
    assert weights is torch.float32 or keep_narrow(model)
    lean = Target(model, linear=Layouts(("half",), auto=True)).lean
    assert str(lean) == "one loop for up to 24 rows"
    assert lean._like.dtype == lean_forward.BITS[weights]


def test_a_layout_that_was_asked_for_is_used():
    assert Target(toy_model("llama"), linear="torch").lean is None


def test_other_types_are_the_models_own():
    lean = lean_target(toy_model("llama", dtype=torch.bfloat16)).lean
    assert str(lean) == "the model's (not of float32)"


def test_the_trial_finds_layers_with_other_numbers():
    """One layer's network counts twice: the forward is the model's own, and so is the text."""
    model = toy_model("llama-grouped")
    network = model.model.layers[0].mlp

    class Twice(type(network)):
        def forward(self, x):
            return 2 * super().forward(x)

    network.__class__ = Twice
    target = lean_target(model)
    assert str(target.lean) == "the model's (other numbers)"
    out = generate(target, make_method("dynamic", target, nodes=9), PROMPT, max_new_tokens=30)
    assert out.tokens == greedy(model, PROMPT, 30)


@pytest.mark.parametrize("layout", ["torch", "half"])
def test_weights_that_changed_are_read_anew(layout):
    """At the next answer, whether the loop reads them or a copy of 16 bits; more is in test_changed_models."""
    model = toy_model("llama-grouped")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    target = Target(model, linear=Layouts((layout,), auto=True))
    assert target.lean.limit
    drafter = make_method("dynamic", target, nodes=9)
    before = generate(target, drafter, PROMPT, max_new_tokens=10).tokens
    assert before == greedy(model, PROMPT, 10)
    model.model.layers[0].self_attn.k_proj.weight = nn.Parameter(torch.randn(16, 32))
    model.model.layers[1].post_attention_layernorm.weight.data = torch.randn(32)
    expected = greedy(model, PROMPT, 10)
    assert expected != before
    assert generate(target, drafter, PROMPT, max_new_tokens=10).tokens == expected


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_only_looks_on_is_called(register):
    """It changes no number, so that the trial alone would let the loop pass it by."""
    model = toy_model("llama-grouped")
    calls = []
    getattr(model.model.layers[1].mlp, register)(lambda *call: calls.append(call))
    target = lean_target(model)
    calls.clear()
    out = generate(target, make_method("vanilla", target), PROMPT, max_new_tokens=9)
    assert len(calls) >= len(out.steps) > 5


def test_one_row_past_a_window_sees_the_window_alone():
    """The same prompt again: its last token is forwarded alone, as a part of the prompt."""
    config = copy.deepcopy(CONFIGS["mistral"])
    config.sliding_window = 6
    model = sharpened(AutoModelForCausalLM.from_config(config).eval())
    target = lean_target(model)
    assert target.lean.limit
    with target.cache(1, tokens=64) as cache:
        for kept in (0, len(PROMPT) - 1):
            cache.length = kept
            draft = Draft(Tree([0]), torch.tensor(PROMPT[-1:]))
            logits = target.prefill(cache, PROMPT, draft, kept=kept).logits
            own = model(torch.tensor([PROMPT])).logits[0, -1:]
            torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4 * float(own.abs().max()))


def test_the_owners_calls_and_gradients_are_the_models_own():
    model = toy_model("llama-grouped")
    ids = torch.tensor([PROMPT])
    own = model(ids).logits
    target = lean_target(model)
    generate(target, make_method("dynamic", target, nodes=9), PROMPT, max_new_tokens=9)
    assert torch.equal(model(ids).logits, own)
    assert not any("forward" in vars(module) for module in model.modules())
    model(ids, labels=ids).loss.backward()
    model.train()
    generate(target, make_method("vanilla", target), PROMPT, max_new_tokens=2)
    assert not target.lean.serves(1, None)


def test_silu_of_any_number():
    x = torch.tensor(
        [[-3e38, -200, -88, -1e-3, 0, 1, 88, 200, 3e38, torch.nan, torch.inf, -torch.inf]]
    )
    out = x.clone()
    lean_loops.silu_times(1, out.numpy(), torch.ones_like(x).numpy(), 0, x.shape[1])
    torch.testing.assert_close(out, nn.functional.silu(x), rtol=1e-6, atol=1e-34, equal_nan=True)


def test_what_one_loop_serves():
    target = lean_target(toy_model("llama-grouped"))
    drafter = make_method("vanilla", target)
    assert target.lean.serves(1, None) and not target.lean.serves(2, None)
    assert target.lean.serves(24, torch.zeros(1)) and not target.lean.serves(25, torch.zeros(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        generate(target, drafter, PROMPT, max_new_tokens=2)
        assert not target.lean.serves(1, None)


def test_a_step_leaves_torchs_threads_as_they_were():
    """Within it torch has one, and a drafter's network all."""
    model = toy_model("llama-grouped")
    with torch_threads(2):
        target = lean_target(model)
        seen = []
        model.model.embed_tokens.register_forward_hook(
            lambda *_: seen.append(torch.get_num_threads())
        )
        target.lean._mode = mode_of(model)
        drafter = make_method("vanilla", target)
        for _ in decode(target, drafter.session(), PROMPT, max_new_tokens=5):
            seen.append(0)
            assert torch.get_num_threads() == 2
        assert seen == [2, *[0, 1] * 4, 0] or seen == [1, *[0, 1] * 4, 0], seen
        with target.beside_loop(), target.drafting():
            assert torch.get_num_threads() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own():
    """A helper of the parent's would never come: the child would wait for ever."""
    lean_forward._helpers(1).submit(int).result()
    child = os.fork()
    if not child:
        try:
            lean_forward._helpers(1).submit(int).result(timeout=30)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0) == (child, 0)


def test_models_of_several_threads_take_turns():
    """Two teams of three would wait for each other's helpers, of which there are two."""
    with torch_threads(3):
        models = [toy_model("llama-grouped"), toy_model("qwen3")]
        targets = [lean_target(model) for model in models]
        drafters = [make_method("vanilla", target) for target in targets]

        def answer(number):
            torch.set_num_threads(3)
            return generate(targets[number], drafters[number], PROMPT, max_new_tokens=60).tokens

        with ThreadPoolExecutor(2) as pool:
            answers = [*pool.map(answer, [0, 1])]
        assert answers == [greedy(model, PROMPT, 60) for model in models]


def test_ctrl_c_while_a_team_is_called_leaves_no_thread_behind(monkeypatch):
    """The first helper waits for two threads that do not come."""
    with torch_threads(3):
        target = lean_target(toy_model("llama-grouped"))
        drafter = make_method("vanilla", target)
        generate(target, drafter, PROMPT, max_new_tokens=2)
        helpers = lean_forward._helpers(2)
        submit = helpers.submit
        called = []

        def interrupted(run, me):
            if me == 2:
                raise KeyboardInterrupt
            called.append(submit(run, me))
            return called[0]

        monkeypatch.setattr(helpers, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(target, drafter, PROMPT, max_new_tokens=9)
        called[0].result(timeout=30)


def test_ctrl_c_before_a_forward_leaves_no_thread_behind(monkeypatch):
    """The helper waits for a thread that does not come; the next forward has it again."""
    with torch_threads(2):
        model = toy_model("llama-grouped")
        target = lean_target(model)
        drafter = make_method("vanilla", target)
        forward = lean_loops.forward

        def interrupted(me, *args):
            if me == 0:
                raise KeyboardInterrupt
            forward(me, *args)

        generate(target, drafter, PROMPT, max_new_tokens=2)

        monkeypatch.setattr(lean_loops, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(target, drafter, PROMPT, max_new_tokens=9)
        monkeypatch.undo()
        lean_forward._helpers(1).submit(int).result(timeout=30)
        out = generate(target, drafter, PROMPT, max_new_tokens=9)
        assert out.tokens == greedy(model, PROMPT, 9)


def test_batches_and_static_steps_are_one_loop(monkeypatch):
    model = toy_model("llama-grouped")
    target = lean_target(model)
    rows = []
    call = lean_forward.LeanForward.__call__

    def noted(lean, cache, tokens, *more):
        rows.append((len(tokens), cache.cursor.write_at is not None))
        return call(lean, cache, tokens, *more)

    monkeypatch.setattr(lean_forward.LeanForward, "__call__", noted)
    prompts = [PROMPT, PROMPT[3:], PROMPT[1:5]]
    for execution in ("eager", "static"):
        drafter = make_method("recycling", target, tree="best:8")
        asked = ((ids, Request(max_new_tokens=20, execution=execution)) for ids in prompts)
        ended = {
            number: out.tokens
            for number, out in decode_batch(target, drafter, asked, 3)
            if out.stop
        }
        assert [ended[i] for i in range(3)] == [greedy(model, ids, 20) for ids in prompts]
        alone = generate(target, drafter, PROMPT, max_new_tokens=20, execution=execution)
        assert alone.tokens == greedy(model, PROMPT, 20)
    assert {at for _, at in rows} == {True, False} and max(rows)[0] > 9


@pytest.mark.parametrize(
    ("lean", "limit"),
    [([1, 1, 1, 1], 24), ([1, 1, 3, 1], 8), ([1, 3, 1, 1], 4), ([3, 1, 1, 1], 0)],
)
def test_ours_serve_as_many_rows_as_are_faster(lean, limit, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        lean_forward.LeanForward, "_measure", lambda *_: ({"own": [2] * 4, "lean": lean}, False)
    )
    target = lean_target(toy_model("llama"))
    assert target.lean.limit == limit
    assert limit or str(target.lean) == "the model's (measured to be slower)"


def test_layers_are_timed_in_turns():
    target = lean_target(toy_model("llama"))
    times, _ = measure(target.lean)
    assert times.keys() == {"own", "lean"}
    assert all(len(each) == 4 and min(each) > 0 for each in times.values())
