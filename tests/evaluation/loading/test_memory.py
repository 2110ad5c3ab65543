"""What does not fit on a GPU is refused before its weights are read; the GPU is a stand-in."""

import pytest
import torch
from transformers import LlamaConfig

from evaluation.loading import devices
from evaluation.loading.models import SHAPES
from model.errors import UserError

GPU = torch.device("cuda", 0)
VICUNA = LlamaConfig(vocab_size=32000, max_position_embeddings=4096, **SHAPES["vicuna-7b"])


@pytest.fixture
def free(monkeypatch):
    """Bytes that the GPU has left."""
    own = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (own[0], 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    return own


def test_a_context_that_does_not_fit_is_refused_with_one_that_does(free):
    """13.5 GB of weights, and 0.52 MB a token: 2.1 GB for 4,096."""
    free[0] = 15_400_000_000
    with pytest.raises(UserError, match=r"model vicuna: weights of 13.5 GB and a cache of 2.1 GB for 4096") as told:
        devices.check_memory("vicuna", VICUNA, torch.float16, GPU, None)
    assert str(told.value).endswith("15.4 GB free on cuda:0; set model.context=2560 or less")
    devices.check_memory("vicuna", VICUNA, torch.float16, GPU, 2560)
    free[0] = 8_000_000_000
    with pytest.raises(UserError, match=r"use model.quantize, model.device_map or a larger GPU"):
        devices.check_memory("vicuna", VICUNA, torch.float16, GPU, 256)


def test_what_fits_and_what_runs_elsewhere_is_not_refused(free):
    free[0] = 16_000_000_000
    devices.check_memory("vicuna", VICUNA, torch.float16, GPU, None)
    free[0] = 0
    devices.check_memory("vicuna", VICUNA, torch.float32, torch.device("cpu"), None)


def test_a_quantised_checkpoint_is_not_counted_by_its_shapes(free):
    """Of weights in 4 bits a quarter is read: how much it is, its own loader knows."""
    free[0] = 8_000_000_000
    config = LlamaConfig(**VICUNA.to_dict() | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    devices.check_memory("vicuna", config, torch.float16, GPU, None)
