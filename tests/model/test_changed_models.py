"""Models that their owners change, wrap, compile or throw away between two answers."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from accelerate import cpu_offload

from model.decoder import Decoder
from model.engine import LAST, Draft, Target, Tree
from model.engine import generate as run
from model.errors import UserError
from model.generate import ATTRIBUTE, Generate
from model.methods import make_method
from tests.conftest import greedy, toy_model

IDS = torch.tensor([[5, 9, 5, 9, 5]])
PROMPT = IDS[0].tolist()


def decoded(model, generate, tokens=20):
    out = model.generate(
        IDS, max_new_tokens=tokens, do_sample=False, eos_token_id=[], custom_generate=generate
    )
    return out[0, len(PROMPT) :].tolist()


def fewer_layers(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 1


def another_layer(model):
    """A layer with as many heads for keys as for queries."""
    other = toy_model("llama", seed=3).model.layers[1]
    model.model.layers[1] = other


CHANGES = {
    "more tokens": lambda model: model.resize_token_embeddings(80),
    "fewer tokens": lambda model: model.resize_token_embeddings(56),
    "cast": lambda model: model.to(torch.float64),
    "other attention": lambda model: model.set_attn_implementation("eager"),
    "fewer layers": fewer_layers,
    "another layer": another_layer,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_gets_a_target_of_its_own(change):
    model, generate = toy_model("llama-grouped"), Generate()
    decoder = Decoder(model)
    decoded(model, generate)
    decoder.generate(PROMPT, max_new_tokens=5)
    CHANGES[change](model)
    with torch.no_grad():  # the new rows say something
        model.get_output_embeddings().weight[-6:].mul_(3.0)
    expected = greedy(model, PROMPT, 20)
    assert decoded(model, generate) == expected
    with pytest.raises(UserError, match="make a new one"):
        decoder.generate(PROMPT, max_new_tokens=5)
    assert Decoder(model, eos=()).generate(PROMPT, max_new_tokens=20).ids == expected


def other_frequencies(model):
    model.model.rotary_emb.inv_freq.data.mul_(0.3)  # which torch does not count


def replaced_frequencies(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.3


def another_scaling(model):
    model.model.layers[0].self_attn.scaling = 1.5


def another_eps(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 20.0


@pytest.mark.parametrize("method", ["dynamic", "vanilla"])
@pytest.mark.parametrize(
    "change", [other_frequencies, replaced_frequencies, another_scaling, another_eps]
)
def test_buffers_and_numbers_may_change_between_two_answers(change, method):
    """What a cache keeps of the prompt is of the old ones; a static step is made anew, as a graph has the numbers."""
    model, prompt = toy_model("llama-grouped"), 6 * PROMPT
    decoder, generate = Decoder(model, eos=(), method=method), Generate()
    before = decoder.generate(prompt, max_new_tokens=20).ids
    decoded(model, generate)
    change(model)
    expected = greedy(model, prompt, 20)
    assert before != expected == decoder.generate(prompt, max_new_tokens=20).ids
    assert decoded(model, generate) == greedy(model, PROMPT, 20)


def another_number_of_the_config(model):
    model.config.attention_dropout = 0.5


def test_a_static_step_is_made_anew_after_a_number_changed():
    model = toy_model("llama-grouped")
    target, made = Target(model), set()
    drafter = make_method("vanilla", target)
    for change in (
        lambda model: None,
        lambda model: None,
        another_scaling,
        another_number_of_the_config,
    ):
        change(model)
        run(target, drafter, PROMPT, max_new_tokens=3, execution="static")
        made.add(*drafter.executors.values())
    assert len(made) == 3


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return 3 * self.inner(*args, **kwargs)


def a_wrapped_layer(model):
    model.model.layers[0].mlp = Wrapped(model.model.layers[0].mlp)


def a_forward_of_its_own(model):
    layer = model.model.layers[0].mlp
    layer.forward = lambda x: 3 * type(layer).forward(layer, x)


def another_forward_of_its_own(model):
    """Mostly at the old one's address."""
    layer = model.model.layers[0].mlp
    del layer.forward
    layer.forward = lambda x: -2 * type(layer).forward(layer, x)


def compiled(model):
    model.model.layers[0].compile(backend=traced)


def test_other_modules_and_forwards_need_a_new_decoder():
    """Each is refused after the one before it was there at first."""
    model, generate, answers = toy_model("llama-grouped"), Generate(), []
    changes = (a_forward_of_its_own, another_forward_of_its_own, a_wrapped_layer, compiled)
    for change in changes:
        decoder = Decoder(model, eos=())
        answers.append(decoder.generate(PROMPT, max_new_tokens=20).ids)
        assert not decoder.target.changed, "its own packed layers are none"
        change(model)
        with pytest.raises(UserError, match="make a new one"):
            decoder.generate(PROMPT, max_new_tokens=5)
        if change is not compiled:
            assert decoded(model, generate) == greedy(model, PROMPT, 20)
    assert len({*map(tuple, answers)}) == len(changes)


def test_another_class_or_a_class_with_another_forward_needs_a_new_decoder(monkeypatch):
    model = toy_model("llama-grouped")
    decoder, mlp = Decoder(model, eos=()), type(model.model.layers[0].mlp)
    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", lambda self, x: x)
        assert decoder.target.changed
    assert not decoder.target.changed
    norms = [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]
    other = type("Other", (type(norms[0]),), {})
    for norm in norms[:2]:  # the second one's class is known by then
        norm.__class__ = other
        assert decoder.target.changed
        decoder = Decoder(model)


def test_the_layouts_of_other_decoders_are_no_change_of_the_owner():
    model = toy_model("llama-grouped")
    decoder = Decoder(model, eos=(), linear="torch")
    for linear in ("fused", "auto"):
        other = Decoder(model, linear=linear)
        assert decoder.generate(PROMPT, max_new_tokens=20).ids == greedy(model, PROMPT, 20)
        other.release()
        assert not decoder.target.changed


def test_weights_may_change_and_be_tied_anew():
    """Nothing is known of their values: what was learnt is kept, and the text is the new one's."""
    model, generate = toy_model("llama-grouped"), Generate()
    before = decoded(model, generate)
    (target,) = vars(model)[ATTRIBUTE].targets.values()
    model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach() * 2)
    assert before != decoded(model, generate) == greedy(model, PROMPT, 20)
    assert [*vars(model)[ATTRIBUTE].targets.values()] == [target]


def _by_fused_adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.zero_grad()


def _by_numpy(model):
    for parameter in model.parameters():
        parameter.detach().numpy()[...] *= 1.1


@torch.no_grad()
def _one_value(model):
    """None of those that are compared: torch counts this write."""
    model.get_input_embeddings().weight[PROMPT[0], 1] += 20


def _at_an_address_used_again(model):
    for parameter in model.parameters():
        data = parameter.detach() * 1.1
        parameter.data = torch.empty(0)
        fresh = torch.empty_like(data)  # mostly where the old one was
        parameter.data = fresh.copy_(data)


@pytest.mark.parametrize(
    "write", [_by_fused_adamw, _by_numpy, _at_an_address_used_again, _one_value]
)
def test_writes_of_any_kind_are_noticed(write, monkeypatch):
    """By the decoder's packed weights and its cache, and the owner's own calls never take a packed copy."""
    monkeypatch.setattr("model.engine.linear.SMALL_PRODUCT", 0)
    model = toy_model("llama-grouped")
    decoder, generate = Decoder(model, eos=()), Generate()
    for _ in range(3):
        write(model)
        unpacked = copy.deepcopy(model)
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, unpacked(IDS).logits)
        expected = greedy(unpacked, PROMPT, 20)
        assert (
            decoder.generate(PROMPT, max_new_tokens=20).ids == expected == decoded(model, generate)
        )


def test_a_model_can_be_trained_after_a_decoder_that_was_made_in_inference_mode():
    """Whose tensors take no part in training; the layers may still be packed."""
    for linear in ("auto", "fused"):
        model = toy_model("llama-grouped")
        with torch.inference_mode():
            Decoder(model, linear=linear).generate(PROMPT, max_new_tokens=5)
        model(IDS, labels=IDS).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_is_freed_when_its_owner_lets_it_go():
    for method in ("dynamic", "lookahead"):
        model, generate = toy_model("llama-grouped"), Generate(method)
        decoded(model, generate)
        gone = weakref.ref(model)
        gc.collect()
        gc.disable()
        try:
            del model
            assert gone() is None, "something refers to it: a cycle waits for the collector"
        finally:
            gc.enable()
        model = toy_model("llama-grouped")  # perhaps at the same address
        assert decoded(model, generate) == greedy(model, PROMPT, 20)


def traced(*arguments):
    raise AssertionError(
        "traced: a draft has many shapes, and with fullgraph=True there is an end to retracing"
    )


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend=traced, fullgraph=True)
    return model


def compiled_in_place(model):
    model.compile(backend=traced)
    return model


def compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend=traced)
    return model


WAYS = [
    lambda model: torch.compile(model, backend=traced),
    compiled_forward,
    compiled_in_place,
    compiled_layers,
]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_answers_uncompiled_and_hidden_states_are_read(way):
    expected = greedy(toy_model("llama-grouped"), PROMPT, 20)
    model = way(toy_model("llama-grouped"))
    decoder = Decoder(model, eos=())
    assert decoder.generate(PROMPT, max_new_tokens=20).ids == expected
    target = decoder.target
    with target.cache(1) as cache:
        outputs = target.prefill(
            cache, PROMPT, Draft(Tree.chain(0), torch.tensor(PROMPT[-1:])), hidden=(1, LAST)
        )
        assert outputs.hidden is not None and outputs.hidden.shape == (5, 64)


def test_offloaded_embeddings_are_driven_and_a_dynamically_quantised_head_is_refused():
    """Its weights had no device, and its head no shape: tracebacks where `generate` works."""
    model = toy_model("llama-grouped")
    expected = greedy(model, PROMPT, 20)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert (
        Decoder(model, eos=()).generate(PROMPT, max_new_tokens=20).ids
        == expected
        == decoded(model, Generate())
    )
    quantised = torch.ao.quantization.quantize_dynamic(
        toy_model("llama-grouped"), {torch.nn.Linear}
    )
    with pytest.raises(
        UserError, match="has no head with a tensor of weights; after torch's quantize_dynamic"
    ):
        Decoder(quantised)


def test_a_target_first_made_inside_autocast_is_as_one_made_outside():
    model, generate = toy_model("llama-grouped"), Generate()
    with torch.autocast("cpu", torch.bfloat16):
        assert decoded(model, generate) == greedy(model, PROMPT, 20)
    assert decoded(model, generate) == greedy(model, PROMPT, 20)


class Adapter:
    """What peft's models have: settings, and the transformers model whose layers they changed."""

    def __init__(self, model, prompt_learning, alora=None):
        self.model = model
        settings = dict(
            is_prompt_learning=prompt_learning, peft_type="X_TUNING", alora_invocation_tokens=alora
        )
        self.active_peft_config = type("Settings", (), settings)
        self.peft_config = {"default": self.active_peft_config}

    def get_base_model(self):
        return self.model

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return type(self.model).prepare_inputs_for_generation(self.model, *args, **kwargs)


def test_an_adapter_inside_the_layers_is_used_and_one_of_the_inputs_refused():
    model = toy_model("llama-grouped")
    decoder = Decoder(Adapter(model, False), eos=())
    assert decoder.generate(PROMPT, max_new_tokens=20).ids == greedy(model, PROMPT, 20)
    with pytest.raises(UserError, match="X_TUNING"):
        Decoder(Adapter(model, True))
    # as peft sets it
    model.prepare_inputs_for_generation = Adapter(model, False).prepare_inputs_for_generation
    assert decoded(model, Generate()) == greedy(model, PROMPT, 20)
    model.prepare_inputs_for_generation = Adapter(model, True).prepare_inputs_for_generation
    with pytest.raises(UserError, match="prompt tuning"):
        decoded(model, Generate())


class Tuned(torch.nn.Linear):
    """As peft's layers: what acts is an attribute, no parameter."""

    merged_adapters = ()
    active_adapters, disable_adapters, scaling = ("a",), False, {"a": 1.5, "b": -0.5}

    def forward(self, input):
        scale = 1 if self.disable_adapters else self.scaling[self.active_adapters[0]]
        return super().forward(input) * (2 * scale if self.training else scale)


def test_what_acts_next_to_the_weights_is_noticed():
    """A prompt's keys and values were those of another adapter, or of a model without its owner's hook."""
    model = toy_model("llama-grouped")
    layer = model.model.layers[0].self_attn.v_proj
    layer.__class__ = Tuned
    decoder = Decoder(model, eos=())
    changes = (
        lambda: setattr(layer, "active_adapters", ("b",)),
        lambda: setattr(layer, "disable_adapters", True),
        lambda: (setattr(layer, "disable_adapters", False), layer.scaling.update(b=3.0)),
        model.train,
        lambda: model.model.layers[0].register_forward_hook(
            lambda module, inputs, output: 2 * output
        ),
    )
    answers = set()
    for change in (lambda: None, *changes):
        change()
        answers.add(tuple(expected := greedy(model, 5 * PROMPT, 20)))
        assert decoder.generate(5 * PROMPT, max_new_tokens=20).ids == expected
    assert len(answers) == 6


@pytest.mark.parametrize("given", [{"adapter_names": ["a"]}, {"alora_offsets": [3]}, {}])
def test_what_peft_computes_for_a_call_is_refused(given):
    """Its `generate` gives the layers arguments by hooks: keywords, or what a function encloses (Poly's task_ids)."""
    model = toy_model("llama-grouped")
    with pytest.raises(UserError, match="aLoRA acts behind its invocation tokens"):
        Decoder(Adapter(model, False, alora=[7, 8]))

    def give(layer, inputs, kwargs, **more):
        return inputs, kwargs

    give.__module__ = "peft.tuners.lora.model"
    hook = partial(give, **given) if given else give
    handle = model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        hook, with_kwargs=True
    )
    with pytest.raises(UserError, match=f"not supported: {next(iter(given), 'arguments of peft')}"):
        decoded(model, Generate())
    handle.remove()
    assert decoded(model, Generate()) == greedy(model, PROMPT, 20)
