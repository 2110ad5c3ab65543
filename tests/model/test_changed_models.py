"""Models that their owners change, wrap, compile or throw away between two answers."""

import copy
import gc
import weakref

import pytest
import torch

from model.decoder import Decoder
from model.errors import UserError
from model.generate import ATTRIBUTE, Generate
from tests.conftest import greedy, toy_model

IDS = torch.tensor([[5, 9, 5, 9, 5]])
PROMPT = IDS[0].tolist()


def decoded(model, generate, tokens=20):
    out = model.generate(IDS, max_new_tokens=tokens, do_sample=False, eos_token_id=[], custom_generate=generate)
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


def _at_an_address_used_again(model):
    for parameter in model.parameters():
        data = parameter.detach() * 1.1
        parameter.data = torch.empty(0)
        fresh = torch.empty_like(data)  # mostly where the old one was
        parameter.data = fresh.copy_(data)


@pytest.mark.parametrize("write", [_by_fused_adamw, _by_numpy, _at_an_address_used_again])
def test_writes_that_torch_does_not_count_are_noticed(write, monkeypatch):
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
        assert decoder.generate(PROMPT, max_new_tokens=20).ids == expected == decoded(model, generate)


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


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


WAYS = [lambda model: torch.compile(model, backend="eager"), compiled_forward, compiled_in_place, compiled_layers]


@pytest.mark.parametrize("way", WAYS)
@torch.compiler.set_stance("force_eager")  # tracing takes ten seconds a test
def test_a_compiled_model_answers_as_it_is_and_hidden_states_are_read_outside_of_compiled_code(way):
    """Compiled code does not notice hooks that come and go; who needs one says so."""
    expected = greedy(toy_model("llama-grouped"), PROMPT, 20)
    model = way(toy_model("llama-grouped"))
    assert decoded(model, Generate()) == expected
    decoder = Decoder(model, eos=())
    assert decoder.generate(PROMPT, max_new_tokens=20).ids == expected
    target = decoder.target
    if way in (compiled_forward, compiled_in_place):
        with pytest.raises(UserError, match="its forward is compiled"), target.hidden_states():
            pass
        return
    with torch.inference_mode(), target.hidden_states():
        target.model(IDS)
        assert target.hidden is not None and target.hidden.shape == (5, 32)


class Adapter:
    """What peft's models have: settings, and the transformers model whose layers they changed."""

    def __init__(self, model, prompt_learning):
        self.model = model
        self.active_peft_config = type("Settings", (), dict(is_prompt_learning=prompt_learning, peft_type="X_TUNING"))
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
    model.prepare_inputs_for_generation = Adapter(model, False).prepare_inputs_for_generation  # as peft sets it
    assert decoded(model, Generate()) == greedy(model, PROMPT, 20)
    model.prepare_inputs_for_generation = Adapter(model, True).prepare_inputs_for_generation
    with pytest.raises(UserError, match="prompt tuning"):
        decoded(model, Generate())
