"""What a GGUF file says beside what transformers reads: followed, or the file is refused by name."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from evaluation.loading import gguf, models
from model.errors import UserError
from tests.conftest import CONFIGS, toy_model
from tests.evaluation.loading.test_gguf import cache, write  # noqa: F401  (a fixture)

FREQS = "rope_freqs.weight"
TEXT = torch.tensor([[(7 * i + i * i) % 59 + 1 for i in range(200)]])


def scaled(theta=10000.0, **rope):
    """The toy model with this scaling of its positions."""
    plain = toy_model("llama-grouped")
    config = LlamaConfig(**CONFIGS["llama-grouped"].to_dict() | {"rope_parameters": {"rope_theta": theta} | rope})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(plain.state_dict())
    return model


def loaded(path):
    return models._load(models.ModelSettings("toy", str(path), device="cpu")).target.model


def llama3_factors(factor, theta, low=1.0, high=4.0, length=8192):
    """As llama.cpp's converter writes them for the four frequencies of the toy model's heads."""
    found = []
    for i in range(0, 8, 2):
        waves = length / (2 * math.pi * theta ** (i / 8))
        smooth = min(max((waves - low) / (high - low), 0), 1)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_llama_3_are_the_models(tmp_path, factor):
    """llama.cpp keeps what each frequency is divided by, and transformers passed over the tensor."""
    theta = 500000.0
    factors = llama3_factors(factor, theta)
    assert factors[:2] == [1, 1] and 1 < factors[2] < factor == factors[3]
    write(tmp_path / "toy.gguf", tensors={FREQS: factors}, theta=theta)
    rule = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    found = loaded(tmp_path / "toy.gguf")
    wanted, plain = scaled(theta, rope_type="llama3", factor=factor, **rule), scaled(theta)
    with torch.inference_mode():
        torch.testing.assert_close(found(TEXT).logits, wanted(TEXT).logits, rtol=1e-4, atol=1e-3)
        assert (wanted(TEXT).logits - plain(TEXT).logits).abs().max() > 0.02, "the scaling decides something"
    assert found.config.rope_parameters["rope_type"] == "llama3"


@pytest.mark.parametrize(
    "more, says",
    [
        ({"architecture": "gemma2"}, "architecture gemma2; GGUF files of llama, qwen2 are read"),
        ({"tensors": {FREQS: [1.0, 1.5, 3.0, 8.0]}}, "has rope_freqs.weight with other factors than Llama 3.1"),
        ({"tensors": {FREQS: [1.0, 2.0]}}, "has rope_freqs.weight with other factors"),
        ({"tensors": {"rope_factors_long.weight": [1.0] * 4}}, "has the tensor rope_factors_long.weight"),
        ({"tensors": {"blk.0.attn_q.bias": [1.0] * 32}}, "has the tensor blk.0.attn_q.bias"),
        ({"without": ("blk.1.ffn_up.weight",)}, "1 of its weights are not in the file .*layers.1.mlp.up_proj"),
        ({"fields": {"rope.scaling.factor": 2.0}}, "has llama.rope.scaling.factor=2.0"),
        ({"fields": {"rope.scaling.type": "yarn"}}, "has llama.rope.scaling.type=yarn"),
        ({"fields": {"attention.sliding_window": 32}}, "has llama.attention.sliding_window=32"),
        ({"fields": {"attention.key_length": 16}}, "has llama.attention.key_length=16"),
        ({"fields": {"expert_count": 8}}, "has llama.expert_count=8"),
        ({"fields": {"something.new": 1}}, "has llama.something.new=1"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(tmp_path, cache, more, says):  # noqa: F811
    write(tmp_path / "toy.gguf", **more)
    with pytest.raises(UserError, match=rf"model .*toy\.gguf: .*{says}") as told:
        gguf.convert(tmp_path / "toy.gguf")
    assert "\n" not in str(told.value) and "cannot read it" not in str(told.value)
    assert not any(cache.glob("*")), "nothing is kept"


def test_what_says_the_same_in_other_words_is_read(tmp_path, cache):  # noqa: F811
    fields = {"attention.key_length": 8, "attention.value_length": 8, "expert_count": 0, "logit_scale": 0.0}
    write(tmp_path / "toy.gguf", fields=fields, tensors={FREQS: [1.0] * 4})
    assert gguf.convert(tmp_path / "toy.gguf").is_dir()
