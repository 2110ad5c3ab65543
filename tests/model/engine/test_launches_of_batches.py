"""What a batch's step launches outside the model, and how often it waits, on the meta device."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.engine import Request, Sampling, Target
from model.engine.attention.cache import CachePool, TreeCache
from model.engine.loop.batch import Batch
from model.methods import make_method
from tests.conftest import toy_model

META = torch.device("meta")


class Watch(TorchDispatchMode):
    """Counts launches on a device and transfers to and from it. What comes from it is zero."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.counting = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        places = [x.device for x in leaves if isinstance(x, torch.Tensor)]
        places += [x for x in leaves if isinstance(x, torch.device)]
        name = func.__name__.split(".")[0]
        goal = places[0 if name == "copy_" else -1] if places else None
        is_view = any(
            out.alias_info and not out.alias_info.is_write for out in func._schema.returns
        )
        if len({place.type for place in places}) > 1:
            self.counts[f"to {goal}"] += self.counting
            if goal != META:
                return args[0] if name == "copy_" else torch.zeros(args[0].shape).long()
        elif goal == META and not is_view:
            self.counts["launches"] += self.counting
        return func(*args, **kwargs or {})

    def uncounted(self, run, *args, **settings):
        """Run the captured part."""
        counting = self.counting
        self.counting = False
        outputs = run(*args, **settings)
        self.counting = counting
        return outputs


def counts_of_a_step(size, method, temperature=0.0, **settings):
    target = Target(toy_model("llama-grouped"))
    target.model.to(META)
    target.device = META
    target._shapes = [replace(shape, device=META) for shape in target._shapes]
    target.caches = CachePool(partial(TreeCache, target._shapes))
    target.batches = {"static"}
    watch = Watch()
    target.forward_static = partial(watch.uncounted, target.forward_static)
    with torch.inference_mode(), watch:
        batch = Batch(target, make_method(method, target, **settings), size)
        for number in range(size):
            sampling = Sampling(temperature=temperature, seed=number)
            request = Request(max_new_tokens=90, sampling=sampling, execution="static")
            batch.begin(number, [5 + number, 6, 7, 8], request)
        for _ in range(2):  # the first ones of a shape
            batch.step()
        # a graph's outputs are copied, too; its forward is made already
        batch.executor.execution = "graph"
        for member in batch.members.values():
            member.request = replace(member.request, execution="graph")
        watch.counting = True
        batch.step()
    return watch.counts


@pytest.mark.parametrize(
    ("method", "settings", "most"),
    [
        ("vanilla", {}, 12),
        ("recycling", dict(tree="best:24", eos={2}), 60),
        ("dynamic", dict(nodes=24), 20),
        ("recycling", dict(tree="best:24", temperature=0.7), 100),
        ("dynamic", dict(nodes=24, temperature=0.7), 80),
    ],
)
def test_neither_launches_nor_transfers_grow_with_the_batch(method, settings, most):
    alone = counts_of_a_step(1, method, **settings)
    assert 1 <= alone["launches"] <= most and alone["to cpu"] == 1
    assert counts_of_a_step(6, method, **settings) == alone
