"""A quantised target: its own `generate` is what every method reproduces, and the weights are what rounding says."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

from evaluation.loading import models
from evaluation.loading.settings import ModelSettings
from model.decoder import Decoder
from model.errors import UserError
from model.files import ROOT
from model.quantization import quantize
from tests.conftest import greedy, toy_model

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="optional: pip install torchao"
)
CPU = torch.device("cpu")


def stored_bytes(tensor):
    """Bytes in memory; of a quantised tensor those of its parts."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt-neox", "gemma"])
def test_weights_are_rounded_and_nothing_else_changes(name):
    model, before = toy_model(name), toy_model(name)
    quantize(model, "int8", CPU)
    seen = 0
    for (path, layer), (_, stock) in zip(
        model.named_modules(), before.named_modules(), strict=True
    ):
        if isinstance(layer, nn.Linear):
            seen += 1
            was = stock.weight.detach().numpy()
            now = layer.weight.dequantize().numpy()
            # 255 levels, a scale each output
            step = np.abs(was).max(axis=1, keepdims=True) / 127.5 + 1e-30
            assert np.abs(now - was).max() > 0 and (np.abs(now - was) <= 0.51 * step).all(), path
            assert np.allclose(now / step, np.round(now / step), atol=1e-3), path
            assert stored_bytes(layer.weight) < 0.55 * stored_bytes(stock.weight), (
                "a scale a row of toy width"
            )
        else:
            for own, other in zip(
                layer.parameters(recurse=False), stock.parameters(recurse=False), strict=True
            ):
                assert torch.equal(own, other), path
    assert seen > 8


@pytest.mark.parametrize(
    "how, says",
    [
        ({"quantize": "int4"}, "quantize=int4: is for bfloat16 on a CUDA device"),
        (
            {"quantize": "int8", "linear": "onednn"},
            "linear=onednn: is for weights that are not quantised",
        ),
        ({"quantize": "int3"}, "model.quantize=int3"),
    ],
)
def test_what_cannot_be_is_refused(how, says):
    with pytest.raises(UserError, match=says):
        models.random_model("tiny", ModelSettings("x", "x", device="cpu", **how))


def test_layers_on_several_devices_or_of_another_kind_are_not_quantised(monkeypatch):
    with pytest.raises(
        UserError, match=r"quantize=int8: torchao quantises 0% of this model's weights"
    ):
        quantize(toy_model("gpt2"), "int8", CPU)  # its layers are Conv1D
    with pytest.raises(UserError, match=r"model\.quantize=int8: is for a model on one device"):
        ModelSettings("x", "x", quantize="int8", device_map="auto")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UserError, match="quantize=int8: needs torchao; pip install torchao"):
        quantize(toy_model("llama"), "int8", CPU)


def test_in_code():
    decoder = Decoder.from_pretrained(
        str(ROOT / "data/embedded"), quantize="int8", method="dynamic"
    )
    stock = Decoder.from_pretrained(str(ROOT / "data/embedded"), dtype="float32")
    ids = decoder.ids_of("Name a river. Name a river.")
    assert decoder.generate(ids, max_new_tokens=30).ids == greedy(
        decoder.target.model, ids, 30, eos=[*decoder.eos]
    )
    weights = [sum(map(stored_bytes, own.target.model.parameters())) for own in (decoder, stock)]
    assert weights[0] < 0.6 * weights[1], "the table of embeddings stays"
