"""What a GPU is asked for before anything runs on it, told by stand-ins."""

from types import SimpleNamespace

import pytest
import torch

from model.engine import Target, target
from model.errors import UserError
from tests.conftest import toy_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """What makes a target of a model that says that it is on a GPU; it is probed where it is."""
    asked, probe = [], target.probe_layers
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda wanted: asked.append(("cudnn", wanted)))
    monkeypatch.setattr(target, "probe_layers", lambda model, name, context, device: probe(model, name, context, CPU))

    def make(linear):
        model = toy_model("llama")
        weight = SimpleNamespace(device=GPU, dtype=torch.float32)
        monkeypatch.setattr(target, "TreeMasks", lambda dtype, device: None)
        model.get_input_embeddings = lambda: SimpleNamespace(weight=weight)
        Target(model, linear=linear)
        return asked

    return make


def test_cudnn_attention_is_off_on_a_gpu(on_a_gpu):
    assert ("cudnn", False) in on_a_gpu("torch")


def test_what_fused_products_leave_is_given_back(on_a_gpu):
    assert "empty" in on_a_gpu("fused")


@pytest.mark.parametrize("name", ["static", "graph"])
def test_steps_of_fixed_shape_are_refused_where_layers_are_spread(name):
    """Their buffers are on one GPU; torch would stop in the middle of an answer."""
    found = Target(toy_model("llama"))
    found.devices = [GPU, torch.device("cuda", 1)]
    found.device = GPU
    with pytest.raises(UserError, match=rf"execution={name}: is for a model on one device.*cuda:0, cuda:1; use eager"):
        found.check_execution(name)
    assert found.check_execution("eager") == "eager"
