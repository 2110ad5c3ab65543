"""The cut-down searches find what torch's own find."""

import pytest
import torch

from model.engine import sampling
from model.engine.sampling import GREEDY, Choice, argmax, top_k


@pytest.mark.parametrize("vocab", [61, 64, 128, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_argmax_is_torchs_with_ties_too(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    for n in (1, 7, 81):
        ties = torch.randint(0, 9, (n, vocab), generator=generator).to(dtype)
        noise = torch.randn(n, vocab, generator=generator).to(dtype)
        for logits in (ties, noise, ties[:, :1].expand(n, vocab)):
            assert torch.equal(argmax(logits), logits.argmax(dim=-1))


@pytest.mark.parametrize("vocab", [61, 96, 2048, 32000])
@pytest.mark.parametrize("k", [1, 8, 32])
def test_top_k_is_torchs(vocab, k, monkeypatch):
    monkeypatch.setattr(sampling, "LARGE_VOCAB", 0)
    generator = torch.Generator().manual_seed(vocab)
    for n in (1, 13, 81):
        logits = torch.rand(n, vocab, generator=generator).argsort(dim=-1).float()  # no ties
        assert torch.equal(top_k(logits, k), logits.topk(k, dim=-1).indices)


def test_ties_and_crowded_groups_keep_the_values_right(monkeypatch):
    """The greatest all in one group, or all equal: the values are the k greatest, each column named once."""
    monkeypatch.setattr(sampling, "LARGE_VOCAB", 0)
    crowded = torch.zeros(3, 2048)
    crowded[:, 5::128] = torch.arange(16.0)
    for logits in (crowded, torch.ones(3, 2048), torch.full((3, 2048), float("-inf"))):
        found = top_k(logits, 8)
        assert torch.equal(logits.gather(1, found), logits.topk(8, dim=-1).values)
        assert all(len(set(row)) == 8 for row in found.tolist())


def test_choices_are_the_arg_max_and_no_first_candidates():
    """Of equal logits top-k may name any first; the text must not depend on which."""
    logits = torch.randint(0, 3, (7, 32000), generator=torch.Generator().manual_seed(0)).half()
    choices, best, _ = Choice(GREEDY, logits.device).ranked(logits, None, 8)
    assert torch.equal(choices, logits.argmax(dim=-1)) and not torch.equal(choices, best[:, 0])
