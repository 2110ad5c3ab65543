"""Models that their owners change, wrap, compile or throw away between two answers."""

import copy
import gc
import weakref
from operator import attrgetter
from typing import ClassVar

import pytest
import torch
from accelerate import cpu_offload

from model.decoder import Decoder
from model.engine import LAST, Draft, Tree
from model.engine.attention.layers import mode_of
from model.errors import UserError
from model.generate import Generate
from tests.conftest import greedy, toy_model

IDS = torch.tensor([[5, 9, 5, 9, 5]])
PROMPT = IDS[0].tolist()


def decoded(model, generate, tokens=20):
    settings = dict(max_new_tokens=tokens, do_sample=False, eos_token_id=[])
    out = model.generate(IDS, custom_generate=generate, **settings)
    return out[0, len(PROMPT) :].tolist()


def traced(*arguments):
    raise AssertionError("traced: a draft has many shapes, and retracing has an end")


def fewer_layers(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 1


def own_forward(model):
    layer = model.model.layers[0].mlp
    layer.forward = lambda x: 3 * type(layer).forward(layer, x)


def replaced_module(model):
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()


def parametrized(model):
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.v_proj)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.parametrizations.weight.original0.mul_(2)


def another_layer(model):
    layer = copy.deepcopy(model.model.layers[1])
    layer.mlp.down_proj.weight.data.mul_(-3)
    model.model.layers[1] = layer


def another_last_norm(model):
    model.model.norm.weight.data = torch.randn(32)


def scale(model):
    model.model.layers[0].self_attn.scaling *= 3


def widen(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 3.0


def hooked(model):
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *call: -3 * call[2])


def hooked_before(model):
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, given: (args, given | {"hidden_states": 2 * given["hidden_states"]}),
        with_kwargs=True,
    )


def hooked_head(model):
    model.lm_head.register_forward_hook(lambda *call: call[2].roll(1, -1))


def hooked_norm(model):
    model.model.norm.register_forward_hook(lambda *call: call[2].roll(1, -1))


CHANGES = {
    "more tokens": lambda model: model.resize_token_embeddings(80),
    "cast": lambda model: model.to(torch.float64),
    "other attention": lambda model: model.set_attn_implementation("eager"),
    "fewer layers": fewer_layers,
    "a forward of its own": own_forward,
    "compiled": lambda model: model.model.layers[0].compile(backend=traced),
}
FOLLOWED = (replaced_module, parametrized, another_layer, another_last_norm, scale, widen, hooked, hooked_before,
            hooked_head, hooked_norm)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_needs_a_new_decoder_which_generate_makes(change):
    model = toy_model("llama-grouped")
    generate = Generate()
    decoder = Decoder(model)
    decoded(model, generate)
    decoder.generate(PROMPT, max_new_tokens=5)
    assert not decoder.target.changed, "packed layers are no change of the owner's"
    CHANGES[change](model)
    with pytest.raises(UserError, match="make a new one"):
        decoder.generate(PROMPT, max_new_tokens=5)
    if change != "compiled":
        expected = greedy(model, PROMPT, 20)
        assert decoded(model, generate) == expected
        assert Decoder(model, eos=()).generate(PROMPT, max_new_tokens=20).ids == expected


def test_a_hook_on_all_modules_of_a_process_is_called():
    model = toy_model("llama-grouped")
    decoder = Decoder(model, eos=())
    before = decoder.generate(PROMPT, max_new_tokens=20).ids
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output.roll(1, -1) if module is model.lm_head else None
    )
    try:
        expected = greedy(model, PROMPT, 20)
        assert decoder.generate(PROMPT, max_new_tokens=20).ids == expected != before
    finally:
        hook.remove()


@pytest.mark.parametrize("change", FOLLOWED)
def test_an_answer_is_never_of_the_model_as_it_was(change):
    """Whether the decoder follows the change or refuses it: neither its loop nor its kept keys are used."""
    model = toy_model("llama-grouped")
    decoder = Decoder(model, eos=())
    assert decoder.target.lean.limit, "one loop that has read the weights"
    prompt = 5 * PROMPT
    before = decoder.generate(prompt, max_new_tokens=20).ids
    change(model)
    expected = greedy(model, prompt, 20)
    assert expected != before
    try:
        assert decoder.generate(prompt, max_new_tokens=20).ids == expected
    except UserError as refused:
        assert "make a new one" in str(refused)
        assert Decoder(model, eos=()).generate(prompt, max_new_tokens=20).ids == expected


def other_frequencies(model):
    model.model.rotary_emb.inv_freq.data.mul_(0.3)  # which torch does not count


def fused_adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.zero_grad()


@torch.no_grad()
def one_counted_value(model):
    model.get_input_embeddings().weight[PROMPT[0], 1] += 20


def at_an_address_used_again(model):
    for parameter in model.parameters():
        data = parameter.detach() * 1.1
        parameter.data = torch.empty(0)
        fresh = torch.empty_like(data)  # mostly where the old one was
        parameter.data = fresh.copy_(data)


@pytest.mark.parametrize(
    "write",
    [
        other_frequencies,
        fused_adamw,
        one_counted_value,
        at_an_address_used_again,
    ],
)
def test_writes_of_any_kind_are_noticed(write, monkeypatch):
    """By packed weights and caches; the owner's own calls never take a packed copy."""
    monkeypatch.setattr("model.weights.linear.SMALL_PRODUCT", 0)
    model = toy_model("llama-grouped")
    prompt = 6 * PROMPT
    decoder = Decoder(model, eos=())
    generate = Generate()
    before = decoder.generate(prompt, max_new_tokens=20).ids
    decoded(model, generate)
    for _ in range(2):
        write(model)
        expected = greedy(copy.deepcopy(model), prompt, 20)
        assert greedy(model, prompt, 20) == expected != before
        assert decoder.generate(prompt, max_new_tokens=20).ids == expected
        assert decoded(model, generate) == greedy(model, PROMPT, 20)


def test_a_model_can_be_trained_after_a_decoder_that_was_made_in_inference_mode():
    for linear in ("auto", "fused"):
        model = toy_model("llama-grouped")
        with torch.inference_mode():
            Decoder(model, linear=linear).generate(PROMPT, max_new_tokens=5)
        model(IDS, labels=IDS).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_is_freed_when_its_owner_lets_it_go():
    model = toy_model("llama-grouped")
    generate = Generate()
    decoded(model, generate)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    model = toy_model("llama-grouped")  # perhaps at the same address
    assert decoded(model, generate) == greedy(model, PROMPT, 20)


def compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend=traced)
    return model


@pytest.mark.parametrize(
    "way",
    [lambda model: torch.compile(model, backend=traced), compiled_layers],
)
def test_what_is_compiled_answers_uncompiled_and_hidden_states_are_read(way):
    expected = greedy(toy_model("llama-grouped"), PROMPT, 20)
    decoder = Decoder(way(toy_model("llama-grouped")), eos=())
    assert decoder.generate(PROMPT, max_new_tokens=20).ids == expected
    with decoder.target.cache(1) as cache:
        root = Draft(Tree.chain(0), torch.tensor(PROMPT[-1:]))
        outputs = decoder.target.prefill(cache, PROMPT, root, hidden=(1, LAST))
        assert outputs.hidden is not None and outputs.hidden.shape == (5, 64)


def test_offloaded_embeddings_are_driven_and_a_dynamically_quantised_head_is_refused():
    model = toy_model("llama-grouped")
    expected = greedy(model, PROMPT, 20)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert Decoder(model, eos=()).generate(PROMPT, max_new_tokens=20).ids == expected
    dynamically = torch.ao.quantization.quantize_dynamic
    quantised = dynamically(toy_model("llama-grouped"), {torch.nn.Linear})
    with pytest.raises(UserError, match="has no head with a tensor of weights"):
        Decoder(quantised)


class Adapter:
    """What peft's models have: settings, and the transformers model whose layers they changed."""

    def __init__(self, model, prompt_learning=False, alora=None):
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
    decoder = Decoder(Adapter(model), eos=())
    assert decoder.generate(PROMPT, max_new_tokens=20).ids == greedy(model, PROMPT, 20)
    for partial in (dict(prompt_learning=True), dict(alora=[7, 8])):
        with pytest.raises(UserError, match="X_TUNING"):
            Decoder(Adapter(model, **partial))
    # as peft sets it
    learning = Adapter(model, prompt_learning=True)
    model.prepare_inputs_for_generation = learning.prepare_inputs_for_generation
    with pytest.raises(UserError, match="prompt tuning"):
        decoded(model, Generate())


def test_what_peft_computes_for_a_call_is_refused():
    model = toy_model("llama-grouped")

    def give(layer, inputs, kwargs):
        return inputs, kwargs

    give.__module__ = "peft.tuners.lora.model"
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(give, with_kwargs=True)
    with pytest.raises(UserError, match="not supported: arguments of peft"):
        decoded(model, Generate())


class Tuned(torch.nn.Linear):
    """As peft's layers: what acts is an attribute, no parameter."""

    merged_adapters = ()
    active_adapters = ("a",)
    disable_adapters = False
    scaling: ClassVar = {"a": 1.5, "b": -0.5}

    def forward(self, input):
        scale = 1 if self.disable_adapters else self.scaling[self.active_adapters[0]]
        return super().forward(input) * (2 * scale if self.training else scale)


def test_an_answer_under_autocast_leaves_no_keys_for_one_without_it():
    for seed in range(4):
        model = toy_model("llama-grouped", seed=seed)
        decoder = Decoder(model, eos=())
        prompt = 5 * PROMPT
        steps = decoder.stream(prompt, max_new_tokens=20)
        with torch.autocast("cpu", torch.bfloat16):
            decoder.generate(prompt, max_new_tokens=20)
            next(steps)
        for _ in range(2):  # then after an answer that began under it
            assert decoder.generate(prompt, max_new_tokens=20).ids == greedy(model, prompt, 20)
            answer = prompt + [token for step in steps for token in step.tokens]
            prompt = answer


SWITCHES = {
    "backends.cuda.matmul.fp32_precision": "tf32",
    "backends.mkldnn.matmul.fp32_precision": "bf16",
    "backends.mkldnn.conv.fp32_precision": "bf16",
    "backends.cudnn.conv.fp32_precision": "ieee",
    "backends.cuda.matmul.allow_fp16_accumulation": True,
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": False,
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": False,
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_of_precision_is_part_of_the_mode(switch):
    model = toy_model("llama-grouped")
    before = mode_of(model)
    *path, name = switch.split(".")
    holder = attrgetter(".".join(path))(torch)
    value = getattr(holder, name)
    try:
        setattr(holder, name, SWITCHES[switch])
        assert mode_of(model) != before
    finally:
        setattr(holder, name, value)
    assert mode_of(model) == before


def test_dropout_in_training_mode_is_refused_and_no_head_is_no_error():
    model = toy_model("llama-grouped")
    model.train()
    Decoder(model)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(UserError, match=r"dropout.*call eval\(\)"):
        Decoder(model)
    decoder = Decoder(model.eval(), eos=())
    model.train()
    with pytest.raises(UserError, match=r"call eval\(\)"):
        decoder.generate(PROMPT, max_new_tokens=5)
    model.eval().lm_head.weight.data.zero_()
    assert Decoder(model, eos=()).generate(PROMPT, max_new_tokens=5).ids == [0] * 5


def test_adapters_that_are_switched_are_noticed():
    """A prompt's keys and values were those of another adapter."""
    model = toy_model("llama-grouped")
    layer = model.model.layers[0].self_attn.v_proj
    layer.__class__ = Tuned
    decoder = Decoder(model, eos=())
    changes = (
        lambda: None,
        lambda: setattr(layer, "active_adapters", ("b",)),
        lambda: layer.scaling.update(b=3.0),
        lambda: setattr(layer, "disable_adapters", True),
        model.train,
    )
    answers = set()
    for change in changes:
        change()
        expected = greedy(model, 5 * PROMPT, 20)
        assert decoder.generate(5 * PROMPT, max_new_tokens=20).ids == expected
        answers.add(tuple(expected))
    assert len(answers) == len(changes)
