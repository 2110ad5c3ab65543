"""A step on the meta device, where nothing is computed: one that reads a value on the host raises."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.engine import GREEDY, Draft, Sampling, Target
from model.engine.attention.cache import LayerShape, TreeCache
from model.engine.graphs.static_step import Setup, StaticStep
from model.engine.loop.step import Executor
from model.engine.rule.sampling import Choice
from model.methods import make_method
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model

META = torch.device("meta")
V = 32000


class Noise(TorchDispatchMode):
    """Notes for how many rows noise is drawn."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten.log1p.default:
            self.rows.append(len(out))
        return out


def test_nodes_of_one_depth_share_their_noise():
    """It is drawn for as many depths as a draft has, rounded up as rows are, and not for each node."""
    target = Target(toy_model("llama"))
    drafter = make_method("dynamic", target)
    sampling = Sampling(temperature=1.0, seed=3)
    tree = build_template("best", nodes=24)
    draft = Draft(tree, torch.arange(3, 3 + len(tree)))
    with torch.inference_mode(), target.cache(32) as cache, Noise() as noise:
        target.prefill(cache, [5, 6, 7])
        executor = Executor.of(target, cache, drafter, "static")
        executor.set_rule([sampling])
        (out,) = executor.forward(cache, {0: draft}, drafter)
        logits = target.forward(cache, draft).logits
    assert tree.max_depth < 8 and noise.rows == [8]
    positions = cache.length + tree.depths + 1
    assert torch.equal(out.choices, Choice(sampling, target.device).among(logits, positions))


def test_plain_steps_of_drafters_on_the_host_are_drafted_there(monkeypatch):
    """Then choices come in the one transfer of the report; on the device each read was a transfer."""
    target = Target(toy_model("llama"))
    drafter = make_method("dynamic", target)
    monkeypatch.setattr(target, "device", META)
    cache = TreeCache([LayerShape(4, 8, 8, torch.float32, META)] * 2, 512)
    plain = Executor.of(target, cache, drafter, "static").plain.drafter
    (draft,) = plain.draft_all([5])
    assert (draft.tokens.device, draft.tree.device) == (drafter.device,) * 2 != (META,) * 2


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
