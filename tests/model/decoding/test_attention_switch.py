"""Tree attention inside a model: what transformers is told to attend by."""

import random
import threading

import pytest
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from model.decoding import Draft, Target
from model.decoding.attention import TreeAttention
from model.decoding.attention_switch import AttentionSwitch
from model.errors import UserError
from tests.conftest import toy_model
from tests.model.decoding.test_attention import BACKENDS, DEVICE, NAN, inputs
from tests.model.decoding.test_tree import random_tree


class StaticLayer(CacheLayerMixin):
    """Keys and values (1, Hkv, B, D), returned whole; new rows go behind `length`, a tensor."""

    def __init__(self, source, capacity, length):
        super().__init__()
        self.keys, self.values = (
            torch.full((1, t.shape[1], capacity, t.shape[3]), NAN, device=t.device)
            for t in (source.keys, source.values)
        )
        self.length, self.is_initialized = length, True

    def lazy_initialization(self, *args): ...

    def update(self, key_states, value_states, *args, **kwargs):
        rows = self.length + torch.arange(key_states.shape[2], device=key_states.device)
        return self.keys.index_copy_(2, rows, key_states), self.values.index_copy_(2, rows, value_states)

    def get_mask_sizes(self, query_length):
        return self.keys.shape[2], 0

    def get_seq_length(self):
        return 0

    def get_max_length(self):
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@torch.inference_mode()
def test_a_model_gives_the_same_logits_as_with_sdpa(name, backend):
    model, rng = toy_model(name).to(DEVICE), random.Random(3)
    prompt = [rng.randrange(3, 61) for _ in range(37)]
    tree = random_tree(5, rng).on(torch.device(DEVICE))
    draft = Draft(tree, torch.tensor([prompt[-1]] + [rng.randrange(61) for _ in range(5)], device=DEVICE))
    target = Target(model)
    cache = target.cache(len(tree)).__enter__()
    target.prefill(cache, prompt)
    expected = target.forward(cache, draft)
    past = cache.length

    length = torch.tensor(past, device=DEVICE)
    layers = [StaticLayer(layer, 64, length) for layer in cache.layers]
    for mine, theirs in zip(layers, cache.layers, strict=True):
        mine.keys[:, :, :past], mine.values[:, :, :past] = theirs.keys[:, :, :past], theirs.values[:, :, :past]
    _, kv_heads, _, dim = layers[0].keys.shape
    attention = TreeAttention(4, kv_heads, dim, len(tree), 64, length, torch.float32, backend=backend)
    attention.set_tree(tree.ancestors)
    switch = AttentionSwitch()
    model.set_attn_implementation(switch.name)
    arguments = dict(input_ids=draft.tokens[None], position_ids=(tree.depths + past)[None], use_cache=True)
    with switch.use(attention):
        got = model(**arguments, past_key_values=Cache(layers=layers)).logits[0]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    target.prefill(cache, prompt)  # outside `use` it is sdpa
    torch.testing.assert_close(target.forward(cache, draft), expected, rtol=1e-3, atol=1e-3)


def test_what_the_kernel_does_not_know_is_refused():
    q, k, v, length, _ = inputs(4, 2, 16, 5, 64, 3)
    attention = TreeAttention(4, 2, 16, 5, 64, length, torch.float32, backend="torch")
    switch = AttentionSwitch()
    module = torch.nn.Identity()
    with switch.use(attention):
        for wrong in (dict(attention_mask=q), dict(attention_mask=None, softcap=30.0)):
            with pytest.raises(UserError, match="use sdpa"):
                switch(module, q, k, v, **wrong)
    assert switch.active is None


def test_a_tree_is_attended_by_the_thread_that_uses_it():
    """Another thread's forward in the meantime is sdpa's."""
    switch, seen = AttentionSwitch(), []
    switch._sdpa = lambda *args, **kwargs: seen.append("sdpa")
    q, kv = torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 8, 4)

    def attend():
        switch(torch.nn.Module(), q, kv, kv, None)

    def active(q, k, v, *, scale):
        seen.append("tree")
        return q

    with switch.use(active):
        attend()
        other = threading.Thread(target=attend)
        other.start()
        other.join()
    attend()
    assert seen == ["tree", "sdpa", "sdpa"]
