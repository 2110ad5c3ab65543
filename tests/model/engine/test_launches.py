"""A step on the meta device, where nothing is computed: one that reads a value on the host raises."""

import pytest
import torch

from model.engine import Target
from model.engine.cache import LayerShape, TreeCache
from model.engine.sampling import GREEDY, Choice
from model.engine.static_step import Setup, StaticStep
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model

META = torch.device("meta")
V = 32000


@pytest.mark.parametrize("eos", [None, [], [2]], ids=["plain", "recycling", "with an EOS"])
def test_a_step_reads_no_value_on_the_host(eos, monkeypatch):
    target = Target(toy_model("llama"))
    monkeypatch.setattr(target, "device", META)

    def forward(cache, tokens, *at, **more):
        return torch.empty(len(tokens), V, dtype=torch.float16, device=META), None

    monkeypatch.setattr(target, "forward_static", forward)
    cache = TreeCache([LayerShape(4, 8, 8, torch.float16, META)] * 2, 512)
    drafter = Vanilla(META)
    if eos is not None:
        drafter = TokenRecycling(V, build_template("2.2.2"), device=META, eos=eos)
    step = StaticStep(Setup(target, cache, 256, Choice(GREEDY, META)), drafter, drafter.tree)
    with torch.inference_mode():
        step.run()
