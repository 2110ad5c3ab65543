"""A quantised target: its own `generate` is what every method reproduces."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from model.decoder import Decoder
from model.errors import UserError
from model.files import ROOT
from model.weights.quantization import torchao_config
from tests.conftest import greedy

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="optional: pip install torchao"
)
EMBEDDED = str(ROOT / "data/embedded")


def test_int8_rounds_the_linear_layers_and_nothing_else():
    decoder = Decoder.from_pretrained(EMBEDDED, quantize="int8", method="dynamic")
    stock = Decoder.from_pretrained(EMBEDDED, dtype="float32")
    ids = decoder.ids_of("Name a river. Name a river.")
    expected = greedy(decoder.target.model, ids, 30, eos=[*decoder.eos])
    assert decoder.generate(ids, max_new_tokens=30).ids == expected
    for name, own in decoder.target.model.named_parameters():
        other = stock.target.model.get_parameter(name).detach()
        if not hasattr(own, "__tensor_flatten__"):
            assert torch.equal(own, other) and ("embed" in name or own.dim() == 1), name
            continue
        was = other.numpy()
        now = own.dequantize().float().numpy()
        # 255 levels, a scale each output
        step = np.abs(was).max(axis=1, keepdims=True) / 127.5 + 1e-30
        assert np.abs(now - was).max() > 0 and (np.abs(now - was) <= 0.51 * step).all(), name


def test_what_cannot_be_is_refused(monkeypatch):
    for how, says in (
        ({"quantize": "int4"}, "quantize=int4: is for bfloat16 on a CUDA device"),
        ({"quantize": "int3"}, "quantize=int3: there is int8, int4"),
        ({"quantize": "int8", "linear": "onednn"}, "linear=onednn: is for weights that are not"),
    ):
        with pytest.raises(UserError, match=says):
            Decoder.from_pretrained(EMBEDDED, device="cpu", **how)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UserError, match="quantize=int8: needs torchao; pip install torchao"):
        torchao_config("int8", torch.device("cpu"))
