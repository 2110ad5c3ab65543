"""Layers that see a part of the text: windows, chunks, shared keys; and models that the trial at load time refuses."""

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    BertConfig,
    Cohere2Config,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPTNeoConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
)

from model.engine import Target, generate
from model.engine.layers import Reach
from model.engine.sampling import Sampling
from model.errors import UserError
from model.methods import make_method
from tests.conftest import NARROW, SIZES, greedy, sharpened

WINDOW = 8
HEADS = dict(num_key_value_heads=2, head_dim=8)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
SHORT = SIZES | NARROW | dict(num_hidden_layers=4, sliding_window=WINDOW)
SHARED = dict(
    layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, vocab_size_per_layer_input=61,
    hidden_size_per_layer_input=8, laurel_rank=4, intermediate_size=[48] * 4, activation_sparsity_pattern=[0.0] * 4,
)  # fmt: skip
WINDOWED = {
    "mistral": MistralConfig(**SHORT, num_key_value_heads=2),  # one mask for all of its layers
    "phi3": Phi3Config(**SHORT, num_key_value_heads=2),
    "gemma2": Gemma2Config(**SHORT, **HEADS),  # two types of layers, a mask each
    "gemma3": Gemma3TextConfig(**SHORT, **HEADS, layer_types=["sliding_attention", "full_attention"] * 2),
    "olmo3": Olmo3Config(**SHORT, num_key_value_heads=2),
    "cohere2": Cohere2Config(**SHORT, num_key_value_heads=2),
    "gpt_oss": GptOssConfig(**SHORT, **HEADS, **EXPERTS),  # with sinks
    "llama4": Llama4TextConfig(
        **SIZES | NARROW | dict(num_hidden_layers=4),
        **HEADS,
        **EXPERTS,
        intermediate_size_mlp=48,
        attention_chunk_size=8,
    ),
    "gemma3n": Gemma3nTextConfig(**SHORT | SHARED, **HEADS),  # two layers read another one's keys
}
METHODS = {"vanilla": {}, "dynamic": {"nodes": 10}, "recycling": {"tree": "best:16"}, "pld": {}, "lookahead": {}}
PROMPT = [5, 9, 13, 7, 5, 9, 13, 8, 5, 9, 13, 7, 20, 21, 22, 5, 9, 13, 5, 9, 13, 7]


def toy(config):
    """A random model, sharpened so that its text depends on all that it sees."""
    torch.manual_seed(0)
    return sharpened(Auto.from_config(config).eval(), 3.0)


@pytest.mark.parametrize("family", WINDOWED)
def test_text_behind_a_window_is_the_models_own(family):
    model = toy(WINDOWED[family])
    own, target = greedy(model, PROMPT, 42), Target(model)
    for name, settings in METHODS.items():
        drafter = make_method(name, target, **settings)
        for execution in ("eager", "static", "eager"):  # from the second on hot
            out = generate(target, drafter, PROMPT, max_new_tokens=42, execution=execution)
            assert out.tokens == own, (name, execution)


def test_a_window_that_is_not_kept_is_noticed(monkeypatch):
    """Else the texts above would be equal whatever is masked."""
    target = Target(toy(WINDOWED["gemma2"]))
    own = greedy(target.model, PROMPT, 42)
    monkeypatch.setattr(Reach, "hides", lambda self, rows, columns: rows[:, None] < columns.new_full((1,), -1))
    drafter = make_method("recycling", target, tree="best:16")
    assert generate(target, drafter, PROMPT, max_new_tokens=42).tokens != own


def test_sampling_and_a_kept_beginning_behind_a_window():
    target, sampling = Target(toy(WINDOWED["gpt_oss"])), Sampling(temperature=0.8, seed=3)
    plain, dynamic = make_method("vanilla", target), make_method("dynamic", target, nodes=10)
    texts = [
        generate(target, drafter, PROMPT, max_new_tokens=30, sampling=sampling).tokens for drafter in (plain, dynamic)
    ]
    assert texts[0] == texts[1]


def test_a_short_context_is_no_reason_to_refuse():
    model = toy(WINDOWED["mistral"])
    for context in (2, 5, 14):
        target = Target(model, context=context)
        out = generate(target, make_method("recycling", target, tree="best:16"), [5], max_new_tokens=9)
        assert out.tokens == greedy(model, [5], min(9, context - 1))


def test_what_a_row_sees():
    columns = torch.arange(6)
    # A window of two places, the own one included; what comes later is hidden by the mask of causality.
    assert Reach(2, chunked=False).hides(torch.tensor([4]), columns).tolist() == [[1, 1, 1, 0, 0, 0]]
    assert Reach(3, chunked=True).hides(torch.tensor([4]), columns).tolist() == [[1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BertConfig(**SIZES, intermediate_size=48), "drafts would change what the model says"),  # in both directions
        (GPTNeoConfig(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, window_size=8,
                      attention_types=[[["global", "local"], 1]]), "set the context to 8 or less"),
        (DogeConfig(**SIZES, intermediate_size=48, keep_window_size=64), "set the context to 64 or less"),
        (FalconConfig(**SIZES, alibi=True, new_decoder_architecture=False), "ALiBi"),
    ],
)  # fmt: skip
def test_attention_that_a_tree_would_change_is_refused(config, why):
    with pytest.raises(UserError, match=why):
        Target(toy(config))
