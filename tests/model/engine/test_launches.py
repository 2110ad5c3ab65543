"""What a static step launches besides the model, counted where a device's branches are taken and nothing is computed.

On the meta device no host value can be read: a step that asks for one raises.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.engine import Target
from model.engine.cache import LayerShape, TreeCache
from model.engine.sampling import GREEDY, Choice
from model.engine.static_step import Setup, StaticStep
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model

META, V = torch.device("meta"), 32000
NO_LAUNCH = {
    "to",
    "empty",
    "view",
    "slice",
    "select",
    "expand",
    "unsqueeze",
    "alias",
    "reshape",
    "transpose",
}
NO_LAUNCH |= {"_unsafe_view", "_reshape_alias"}  # views
MAKES = {"cat", "arange"}  # given a list, or nothing


class Launches(TorchDispatchMode):
    """Operators by name, but for those that only look at a tensor in another way."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        there = any(isinstance(value, torch.Tensor) and value.device == META for value in args)
        self.counts[name] += name not in NO_LAUNCH and (there or name in MAKES)
        return func(*args, **(kwargs or {}))


def on_meta(monkeypatch):
    """A target that forwards nothing, and a cache, both where nothing is computed."""
    target = Target(toy_model("llama"))
    monkeypatch.setattr(target, "device", META)
    monkeypatch.setattr(
        target,
        "forward_static",
        lambda cache, tokens, *at, **more: (
            torch.empty(len(tokens), V, dtype=torch.float16, device=META),
            None,
        ),
    )
    return target, TreeCache([LayerShape(4, 8, 8, torch.float16, META)] * 2, 512)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: Vanilla(META), 21),
        (lambda: TokenRecycling(V, build_template("2.2.2"), device=META), 59),
        (lambda: TokenRecycling(V, build_template("2.2.2"), device=META, eos=[2]), 70),
    ],
    ids=["plain", "2.2.2", "2.2.2 with an EOS"],
)
def test_a_step_launches_few_operators_of_its_own(make, most, monkeypatch):
    target, cache, drafter = *on_meta(monkeypatch), make()
    step = StaticStep(Setup(target, cache, 256, Choice(GREEDY, META)), drafter, drafter.tree)
    with torch.inference_mode():
        step.run()  # what a tree derives when it is first asked for
        with Launches() as launches:
            step.run()
    assert launches.counts.total() <= most, launches.counts
